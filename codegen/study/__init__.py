"""Keep a search where it outlives its processes. The only folder that imports Optuna.

`open_study` opens a study in a storage; `Study` gives tiles out and takes their times back, for any number of workers.
"""

from .storage import default_storage, shown
from .study import Claim, Study, open_study

__all__ = ["Claim", "Study", "default_storage", "open_study", "shown"]
