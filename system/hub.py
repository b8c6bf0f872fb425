"""The client of the Hugging Face Hub, with one kind of error for any failure of the Hub, the network or the library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from system.script import UserError, require

if TYPE_CHECKING:
    from huggingface_hub import HfApi


@contextmanager
def open_hub(repo: str, write: bool = False, hint: str = "") -> Iterator[tuple[HfApi, str]]:
    """Yield a client and the full name of `repo` (owner added, hf:// removed). Any failure inside the block becomes a
    UserError, which never shows the token and ends with `hint`. A write without a token raises UserError, too."""
    import httpx2
    from huggingface_hub import HfApi, constants, get_session, get_token

    where, name = constants.ENDPOINT, repo.removeprefix("hf://").removeprefix("datasets/").strip("/")
    if where.startswith("http://"):  # a mirror on the local network has no Xet storage
        constants.HF_HUB_DISABLE_XET = True
    # huggingface_hub has no timeout by default: a network that drops packets would make it hang instead of fail
    get_session().timeout = httpx2.Timeout(300, connect=10)
    mend = "run `hf auth login`, or set HF_TOKEN to one that can write"
    require(get_token() or not write, f"a push to {name} needs a token: {mend}")
    try:
        if write and "/" not in name:
            name = f"{HfApi().whoami()['name']}/{name}"
        yield HfApi(), name
    except UserError:
        raise
    except Exception as error:
        again = f"Run the same command again to continue where it stopped{hint}"
        raise UserError(f"{explain(error, name)}. {again}") from None


def explain(error: Exception, name: str) -> str:
    """What a failure of the library, or what caused it, means for someone who asked for `name`."""
    from huggingface_hub import constants, get_token

    where, chain = constants.ENDPOINT, [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    kinds = {kind.__name__ for e in chain for kind in type(e).__mro__}
    status = next((e.response.status_code for e in chain if hasattr(e, "response")), 0)
    if kinds & {"TransportError", "OfflineModeIsEnabled"}:
        return f"cannot reach {where} for {name} ({type(chain[-1]).__name__}); check the network and HF_HUB_OFFLINE"
    if "HFValidationError" in kinds:
        return f"{name!r} is not a valid repository name; use OWNER/NAME"
    if status:
        mend = "check the name; run `hf auth login`, or set HF_TOKEN to a token with access (write, to push)"
        return f"{where} answered {status} for {name}; {mend if status in (401, 403, 404) else 'wait a moment'}"
    if kinds & {"JSONDecodeError", "FileMetadataError"}:
        return f"{where} did not answer like a Hub for {name}; is there a log-in page or a proxy in between?"
    return str(error).replace(get_token() or "\0", "***")
