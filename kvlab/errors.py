"""Errors a user can meet. Each message says who, got what, why it cannot work, and the ways out.

Exit codes of the command line (evaluation.md 10): 0 ok, 2 bad input, 3 the method never acted, 4 verification failed,
5 a task, model or data set could not be had offline.
"""


class KvlabError(Exception):
    """Base of every error we raise on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


class ConfigError(KvlabError, ValueError):
    """The configuration cannot work."""

    exit_code = 2


class CorruptFile(KvlabError, ValueError):
    """A file exists but is not what its name says."""

    exit_code = 2


class OfflineError(KvlabError):
    """Something must be downloaded and cannot be."""

    exit_code = 5


class MethodNeverActed(KvlabError):
    """A method other than `full` encoded no block and evicted no token in a whole run."""

    exit_code = 3


class CacheTooSmall(KvlabError, ValueError):
    """The pool cannot hold what is asked of it; names the needed and the available bytes."""

    exit_code = 2


class NoBlocks(KvlabError):
    """Internal: the pool has no block left right now. Always handled by the scheduler; the pool is unchanged."""


class InvariantError(KvlabError, AssertionError):
    """Internal: a bookkeeping invariant does not hold. Never repaired in silence."""
