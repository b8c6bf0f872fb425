"""Open a Hugging Face Hub client, with one kind of error for any failure of the Hub, the network or the library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cli import UserError

if TYPE_CHECKING:
    from huggingface_hub import HfApi


@contextmanager
def open_hub(repo: str, write: bool = False, hint: str = "") -> Iterator[tuple[HfApi, str]]:
    """Yield a client and the full name of `repo` (owner added, hf:// removed). Any failure of the Hub, the network or
    the library inside the block becomes a UserError, which never shows the token and ends with `hint`. A write without
    a token raises UserError, too."""
    import httpx2
    from huggingface_hub import HfApi, constants, get_session, get_token

    where, name = constants.ENDPOINT, repo.removeprefix("hf://").removeprefix("datasets/").strip("/")
    if where.startswith("http://"):  # a mirror on the local network has no Xet storage
        constants.HF_HUB_DISABLE_XET = True
    # huggingface_hub has no timeout by default: a network that drops packets would make it hang instead of fail
    get_session().timeout = httpx2.Timeout(300, connect=10)
    if write and not get_token():
        raise UserError(f"a push to {name} needs a token: run `hf auth login`, or set HF_TOKEN to one that can write")
    try:
        user = HfApi().whoami()["name"] if write else ""
        yield HfApi(), f"{user}/{name}" if write and "/" not in name else name
    except (OSError, ValueError, RuntimeError, httpx2.HTTPError) as error:
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
            chain.append(cause)
        kinds = {kind.__name__ for e in chain for kind in type(e).__mro__}
        status = next((e.response.status_code for e in chain if hasattr(e, "response")), 0)
        why = str(error).replace(get_token() or "\0", "***")
        if kinds & {"TransportError", "OfflineModeIsEnabled"}:
            why = f"cannot reach {where} for {name} ({type(chain[-1]).__name__}); check the network and HF_HUB_OFFLINE"
        elif "HFValidationError" in kinds:
            why = f"{name!r} is not a valid repository name; use OWNER/NAME"
        elif status:
            mend = "check the name; run `hf auth login`, or set HF_TOKEN to a token with access (write, to push)"
            why = f"{where} answered {status} for {name}; {mend if status in (401, 403, 404) else 'wait a moment'}"
        elif kinds & {"JSONDecodeError", "FileMetadataError"}:
            why = f"{where} did not answer like a Hub for {name}; is there a log-in page or a proxy in between?"
        raise UserError(f"{why}. Run the same command again to continue where it stopped{hint}") from None
