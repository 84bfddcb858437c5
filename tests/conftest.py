"""Set-up of all tests: quiet, and nothing in the user's own cache folder."""

import os
import tempfile
from pathlib import Path

# Before anything imports MindSpore, which reads some of this then. Processes that tests start see it, too.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="dancegrpo-tests-")
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # as many processes as cores: threads would only get in each other's way
    os.environ["OMP_NUM_THREADS"] = "1"

from dancegrpo.runtime.setup import be_quiet

be_quiet()
