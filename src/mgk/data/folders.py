"""Where prepared sets live: ``MGK_DATA``, else the platform's folder for the data of applications."""

import os
from pathlib import Path

from mgk.data.errors import UsageError


def data_folder() -> Path:
    """The folder that holds one folder a task."""
    chosen = os.environ.get("MGK_DATA")
    if chosen:
        return Path(chosen)
    try:
        from platformdirs import user_data_path
    except ModuleNotFoundError:
        raise UsageError("no data folder: set MGK_DATA to one, or pip install 'mgk[data]'") from None
    return user_data_path("mgk", appauthor=False) / "data"
