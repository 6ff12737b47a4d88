"""Name every mistake: one class each, one message with what was asked, which limit, what to do."""


class FlashsmithError(Exception):
    """Base of every error that flashsmith raises on purpose."""


class UsageError(FlashsmithError, ValueError):
    """What was asked cannot be served; the command line exits with 2."""


class BadProblem(UsageError):
    """A dtype, head dimension, head count or length that the kernels do not serve."""


class IllegalTile(UsageError):
    """A tile that breaks a limit of the kernel or of the GPU."""


class UnknownGpu(UsageError):
    """A GPU name that the table does not know, or a GPU that the templates do not serve."""


class RenderError(FlashsmithError):
    """A template failed to render."""


class CompileError(FlashsmithError):
    """NVRTC refused the source; the message shows its log beside the lines it points at."""


class LaunchError(FlashsmithError):
    """A launch could not be made or failed; `reason` says which."""


class WrongResult(FlashsmithError):
    """A kernel's result lies outside the bound of its check."""


class CannotPredict(FlashsmithError):
    """Machine code that the timing model does not know."""


class NoTunedKernel(FlashsmithError):
    """No record serves the problem, and no default tile fits."""


class BadRecord(FlashsmithError):
    """A tuned record that cannot be read or does not follow the schema."""


class NothingFound(FlashsmithError):
    """A search that ended without one valid candidate."""


class LowerRung(UserWarning):
    """No exact record serves a problem; a record of another length or GPU does, or a default tile."""


class StaleRecord(UserWarning):
    """A tuned record that speaks of another text, compiler or part, and is passed over."""


class ImpossibleTime(FlashsmithError):
    """A measured time below what the work itself takes at the GPU's limits: nothing ran, or the clock is wrong."""


class Rejected(FlashsmithError):
    """A candidate that failed while it was tried; the message starts with the class of failure."""


class StorageLost(FlashsmithError):
    """The storage of a study that cannot be read or written any more."""


class MeasuringBroken(FlashsmithError):
    """No process can measure here, whatever the candidate."""
