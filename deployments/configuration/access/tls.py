"""The certificate by which a server speaks HTTPS."""

import ssl
from pathlib import Path

from pydantic import Field

from decoding.errors import ConfigError
from deployments.configuration.paths import expanded
from deployments.validation.strict import StrictModel


class TlsConfig(StrictModel):
    """A certificate with its key, in files on every node that listens."""

    certificate: str = Field(description="The certificate with those between it and its root, in PEM.")
    key: str = Field(description="Its private key, in PEM, without a password.")

    def anchored(self, folder: Path) -> "TlsConfig":
        """Return it with absolute paths. folder: the configuration's.

        Raises:
            ConfigError: a file is missing or can't be read, a variable is not set, or the key is another certificate's.
        """
        paths = {name: str((folder / expanded(path, key=f"http.tls.{name}")).absolute()) for name, path in self}
        for name, path in paths.items():
            if not Path(path).is_file():
                raise ConfigError(f"http.tls.{name}: there is no file {path}")
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(paths["certificate"], paths["key"])
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"http.tls: the certificate and the key can't be used together: {error}") from error
        return TlsConfig(**paths)

    def client_context(self) -> ssl.SSLContext:
        """Return a context in which clients on this machine trust this certificate alone, by whatever name."""
        context = ssl.create_default_context(cafile=self.certificate)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context
