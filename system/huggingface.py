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

from system.cli import UserError, explain_errors, require

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

    # What the user has set, before anything is sent: the token goes into a header, and a session reads the proxies.
    token = get_token() or ""
    problem = "the token of the Hub has a character that is not ASCII, as from a typographic quote"
    require(token.isascii(), f"{problem}; copy it again: HF_TOKEN, or `hf auth login`")
    problem = "the proxy set by ALL_PROXY, HTTPS_PROXY or HTTP_PROXY is of no use here"
    with explain_errors(problem, "correct the variable, or unset it"):
        session = get_session()

    # huggingface_hub has no timeout by default: on a network that drops packets it would hang, and cost money.
    session.timeout = httpx2.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT)

    try:
        yield HfApi()
    except (
        httpx2.HTTPError,  # the network, and every answer of the Hub that is an error
        httpx2.InvalidURL,  # HF_ENDPOINT
        errors.EntryNotFoundError,
        errors.FileMetadataError,
        errors.HFValidationError,
        errors.LocalTokenNotFoundError,
        errors.OfflineModeIsEnabled,
        errors.RevisionResolutionError,
    ) as failure:
        # A download that fails for whatever reason says that the network may be down: its cause is the Hub's answer.
        error: BaseException = failure
        if isinstance(failure, errors.LocalEntryNotFoundError | errors.RevisionResolutionError) and failure.__cause__:
            error = failure.__cause__
        message = " ".join(f"{constants.ENDPOINT}: {error}".split()).rstrip(".")
        message = message.replace(token or "\0", "***")[:400]

        # What to do about it, where the library's words do not say that.
        if isinstance(error, errors.LocalTokenNotFoundError):
            message = "this machine has no token of the Hub, which a push needs: hf auth login, or set HF_TOKEN"
        elif isinstance(error, httpx2.TransportError | httpx2.InvalidURL):
            message += "; does the network work? HF_ENDPOINT chooses a mirror"
        elif isinstance(error, httpx2.HTTPStatusError | errors.HfHubHTTPError):
            if error.response.status_code in (401, 403, 404):
                message += "; is the name right? A private or gated repository needs a token that may read it: HF_TOKEN"
            else:
                message += "; run the same command again later"
        raise UserError(message) from None
