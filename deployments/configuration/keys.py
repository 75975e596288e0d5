"""The configuration of API keys. Secrets are read here and shown nowhere."""

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, model_validator

from decoding.errors import ConfigError
from deployments.configuration.strict import StrictModel, wrong_field
from deployments.http.keys import ApiKey, digest_of

ENVIRONMENT_KEY = "CONSORT_API_KEY"

_Count = Annotated[int, Field(ge=1)]


class ApiKeyConfig(StrictModel):
    """A client's key: the secret itself, an environment variable that has it, or a file."""

    key: Annotated[SecretStr, Field(min_length=1)] | None = Field(None, description="The secret itself.")
    env: str | None = Field(None, description="An environment variable that has the secret.")
    file: str | None = Field(None, description="A file that has the secret, relative to the configuration's folder.")
    weight: Annotated[float, Field(gt=0)] = Field(1.0, description="Its share where several keys compete.")
    max_requests: _Count | None = Field(None, description="Its requests in progress or waiting at once; null: any.")
    max_tokens: _Count | None = Field(
        None, description="Tokens of their prompts and answers together, as far as they may get; null: any."
    )
    admin: bool = Field(False, description="Whether it may change the server, too: scale its models.")

    @model_validator(mode="after")
    def _one_source(self) -> "ApiKeyConfig":
        if sum(source is not None for source in (self.key, self.env, self.file)) != 1:
            raise wrong_field("key", "should be set, or else env, or else file, and only one of them")
        return self

    def read(self, name: str, folder: Path) -> None:
        """Put the secret into `key`, from wherever it is. folder: the configuration's.

        Raises:
            ConfigError: it is not there.
        """
        if self.env is not None:
            secret, where = os.environ.get(self.env, ""), f"env: the environment has no {self.env}"
        elif self.file is not None:
            secret, where = _content(folder / self.file), f"file: there is no secret in {self.file!r}"
        else:
            return
        if not secret.strip():
            raise ConfigError(f"http.api_keys.{name}.{where}")
        self.key, self.env, self.file = SecretStr(secret.strip()), None, None

    def api_key(self, name: str) -> ApiKey:
        """What the server keeps of it. The secret must have been read."""
        assert self.key is not None
        digest = digest_of(self.key.get_secret_value())
        return ApiKey(name, digest, self.weight, self.max_requests, self.max_tokens, self.admin)


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
