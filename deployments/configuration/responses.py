"""Where answers to /v1/responses are kept, how many and for how long."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from decoding.errors import ConfigError
from deployments.configuration.paths import expanded
from deployments.configuration.values import Count
from deployments.fields.strict import StrictModel, wrong_field

SQLITE = "sqlite:///"
_POSTGRES = ("postgresql://", "postgres://")
_DAY_S = 24 * 3600.0


def _check_store(store: str) -> str:
    if store not in ("memory", "none") and not store.startswith((SQLITE, *_POSTGRES)):
        raise wrong_field("", f"should be memory, none, {SQLITE}PATH or {_POSTGRES[0]}USER@HOST/DATABASE")
    return store


class ResponsesConfig(StrictModel):
    """What is kept of answers to /v1/responses."""

    store: Annotated[str, AfterValidator(_check_store)] | None = Field(
        None,
        description="Where: `memory`, `sqlite:///PATH`, a `postgresql://` URL (which needs `pip install "
        "'consort[postgres]'`), or `none`. null: `memory`, but `none` where several coordinators serve.",
    )
    ttl_s: float = Field(
        30 * _DAY_S, gt=0, description="Seconds for which an answer is kept after it was made or last continued."
    )
    max_bytes: Count = Field(
        64 * 2**20,
        description="What they take together, each counted in whole pages of 4 KiB; beyond that the ones go that were "
        "not continued for longest.",
    )

    def anchored(self, folder: Path) -> "ResponsesConfig":
        """Return it with an absolute path.

        Raises ConfigError if the path's folder is missing, or the driver of the database.
        """
        store = self.store
        if store is not None and store.startswith(SQLITE):
            path = folder / expanded(store.removeprefix(SQLITE), key="responses.store")
            if not path.parent.is_dir() or path.is_dir():
                raise ConfigError(f"responses.store: {path} should be a file, new or old, in a folder that is there")
            return self.model_copy(update={"store": f"{SQLITE}{path.absolute()}"})
        if store is not None and store.startswith(_POSTGRES) and find_spec("psycopg") is None:
            raise ConfigError("responses.store: needs psycopg: pip install 'consort[postgres]'")
        return self

    def for_coordinators(self, count: int) -> str:
        """Return the store of one of so many coordinators.

        Raises ConfigError if they can't share the one that is configured.
        """
        store = self.store or ("memory" if count == 1 else "none")
        if count > 1 and store != "none" and not store.startswith(_POSTGRES):
            raise ConfigError(
                f"responses.store: is {store!r}, which {count} coordinators can't share; set a postgresql:// URL, or "
                "none"
            )
        return store
