"""Set-up of all tests: quiet, and nothing in the user's own cache folder."""

import os
import tempfile
from pathlib import Path

# Before anything imports MindSpore, which reads some of this then. Processes that tests start see it, too.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="dancegrpo-tests-")
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

from dancegrpo.runtime.setup import be_quiet

be_quiet()
