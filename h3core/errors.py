"""Errors a user can act on. A message says what was asked, what is allowed and what to do, in its first line."""

import torch


class H3Error(Exception):
    """Base of every error the user can act on."""


class RequestError(H3Error, ValueError):
    """Impossible request; raised before any heavy work, and the same on every rank."""


class CheckpointError(H3Error):
    """A checkpoint that cannot be used: names the file, the keys, and the wanted and found shapes."""


class DeviceMemoryError(H3Error, torch.OutOfMemoryError):
    """A stage that does not fit on its device; what earlier stages gave is not lost.

    Also PyTorch's own error: a host frees its models when it sees one.
    """


class OutputError(H3Error):
    """A result that cannot be written: an unwritable folder, a full disk, samples that are not finite."""
