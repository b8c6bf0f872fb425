"""huggingface_hub behind one `except`: whatever the Hub or the network refuses becomes a UserError of one line.

    with open_hub() as api:
        folder = api.snapshot_download("OWNER/NAME")

Called by hub.py, tokens/sources.py and weights/convert.py. The Hub's own variables apply: HF_ENDPOINT, HF_TOKEN,
HF_HOME, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from system.cli import UserError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CONNECT_TIMEOUT = 10  # seconds
READ_TIMEOUT = 300  # seconds without a byte; the Hub may take minutes to accept a commit of large files


@contextmanager
def open_hub() -> Iterator[HfApi]:
    """Yield a client of the Hub. Its errors become a UserError with the library's own words, without the token."""
    import httpx2
    from huggingface_hub import HfApi, constants, errors, get_session, get_token

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
        errors.EntryNotFoundError,  # also: neither on this machine nor reachable
        errors.FileMetadataError,
        errors.HFValidationError,
        errors.LocalTokenNotFoundError,
        errors.OfflineModeIsEnabled,
    ) as error:
        message = " ".join(f"{constants.ENDPOINT}: {error}".split()).rstrip(".")
        message = message.replace(get_token() or "\0", "***")
        fix = "is the name right, and does the network work? A private repository needs HF_TOKEN, a mirror HF_ENDPOINT"
        raise UserError(f"{message[:400]}; {fix}") from None
