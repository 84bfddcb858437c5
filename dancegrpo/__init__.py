"""dancegrpo: RL post-training of text-to-image diffusion models on MindSpore.

A denoising chain is a Markov decision process; one training loop improves the policy of any model that
gives the mean, the standard deviation and the log-probability of its transitions.

Nothing is imported here, so that ``dancegrpo.config`` and the command lines' ``-h`` stay fast.
"""

__version__ = "0.1.0"
