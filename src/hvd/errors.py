"""The exception tree. Every error a caller may want to catch derives from `HVDError`.

    HVDError
    ├── ConfigError            a parameter, option or configuration value is out of range   (also ValueError)
    ├── ModelError             a model can't be used
    │   ├── UnsupportedModelError   it is of a kind that this project does not decode
    │   └── CheckpointError         its files are missing, torn or inconsistent
    ├── RequestError           one request can't be served: empty prompt, longer than the context, ...
    ├── CacheFileError         a saved suffix cache is foreign, torn or of another format
    ├── PredictorError         a predictor or cost file is foreign, torn or of another format
    ├── TraceError             a trace file can't be read
    └── MissingExtraError      an optional dependency is not installed                      (also ImportError)

A message is one line: what was wrong, what is allowed, what to do.
"""


class HVDError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(HVDError, ValueError):
    """A parameter, option or configuration value is out of range."""


class ModelError(HVDError):
    """A model can't be used."""


class UnsupportedModelError(ModelError):
    """The model is of a kind that this project does not decode (the message says which kinds it does)."""


class CheckpointError(ModelError):
    """A checkpoint's files are missing, torn or inconsistent (the message names the file or tensor)."""


class RequestError(HVDError, ValueError):
    """One request can't be served; others are not affected."""


class CacheFileError(HVDError):
    """A saved suffix cache is foreign, torn or of another format. The file is left alone."""


class PredictorError(HVDError):
    """A predictor or cost file is foreign, torn or of another format. The file is left alone."""


class TraceError(HVDError):
    """A trace file can't be read."""


class TrainingError(HVDError):
    """Training can't go on: nothing to learn from, no room on the disk, or a loss that is not a number."""


class MissingExtraError(HVDError, ImportError):
    """An optional dependency is not installed (the message says which extra to install)."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(
            f"{what} needs the extra '{extra}'; install it with: pip install 'hvd[{extra}]' "
            f"(in a checkout: pip install -e '.[{extra}]')"
        )
