"""huggingface_hub behind one `except`: whatever the Hub or the network refuses becomes a UserError of one line.

    with open_hub() as api:
        folder = api.snapshot_download("OWNER/NAME")

The Hub's own variables apply: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from system.errors import UserError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CONNECT_TIMEOUT = 10  # seconds
READ_TIMEOUT = 300  # seconds without a byte; the Hub may take minutes to accept a commit of large files


@contextmanager
def open_hub() -> Iterator[HfApi]:
    """Yield a client of the Hub. Its errors become a UserError with the library's own words."""
    import httpx2
    from huggingface_hub import HfApi, constants, errors, get_session

    # A mirror hands out the address of the Hub's own Xet storage, which its user may not be able to reach.
    is_mirror = constants.ENDPOINT != "https://huggingface.co"
    if is_mirror and "HF_HUB_DISABLE_XET" not in os.environ:
        constants.HF_HUB_DISABLE_XET = True

    # huggingface_hub has no timeout by default: on a network that drops packets it would hang, and cost money.
    get_session().timeout = httpx2.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT)

    try:
        yield HfApi()
    except (
        httpx2.HTTPError,  # the network, and every answer of the Hub that is an error
        errors.EntryNotFoundError,
        errors.RevisionResolutionError,
        errors.HFValidationError,
        errors.LocalTokenNotFoundError,
        errors.OfflineModeIsEnabled,
    ) as error:
        # A download that fails for whatever reason says that the network may be down: its cause is the Hub's answer.
        is_wrapped = isinstance(error, errors.LocalEntryNotFoundError | errors.RevisionResolutionError)
        reason = error.__cause__ if is_wrapped and error.__cause__ else error
        message = " ".join(f"{constants.ENDPOINT}: {reason}".split()).rstrip(".")
        if isinstance(reason, errors.HfHubHTTPError) and reason.response.status_code in (401, 403, 404):
            message += "; is the name right? A private or gated repository needs a token that may read it: HF_TOKEN"
        elif isinstance(reason, httpx2.TransportError):
            message += "; check the network"
        raise UserError(message) from None
