"""Make certificates with the command `openssl`: of an authority, a server and a client.

The server's is valid for 127.0.0.1 only. Its key belongs to the user `nobody`, which runs
databases.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from support.waiting import patience_s
from taskguard_sandbox.process import nobody

__all__ = ["Certificates", "unavailable"]


def unavailable() -> str | None:
    """Return None if certificates can be made, else the reason in words."""
    return None if shutil.which("openssl") else "openssl is not installed"


@dataclass(frozen=True)
class Certificates:
    """Files in PEM, each with its key."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        """Make all three of them, valid for a day."""
        made = cls(folder)
        folder.chmod(0o755)
        _certificate(made.authority, "keyUsage = critical, keyCertSign", authority=True)
        signed = ("-CA", made.authority, "-CAkey", made.authority.with_suffix(".key"))
        _certificate(folder / "server.crt", "subjectAltName = IP:127.0.0.1", *signed)
        _certificate(folder / "client.crt", "", *signed)
        user = nobody()
        if user is not None:
            os.chown(made.key, *user)
        return made

    @property
    def server(self) -> Path:
        """Return the path of the server's certificate."""
        return self.folder / "server.crt"

    @property
    def key(self) -> Path:
        """Return the path of the server's key."""
        return self.server.with_suffix(".key")

    @property
    def authority(self) -> Path:
        """Return the path of the authority's certificate."""
        return self.folder / "ca.crt"

    def of_server(self) -> dict[str, str]:
        """Return the options of a Redis with TLS and this certificate, which requires a client's
        certificate."""
        return {
            "tls_cert_file": str(self.folder / "server.crt"),
            "tls_key_file": str(self.folder / "server.key"),
            "tls_ca_cert_file": str(self.authority),
            "tls_auth_clients": "yes",
            "tls_replication": "yes",
        }

    def of_client(self) -> str:
        """Return the options of a URL."""
        crt, key = self.folder / "client.crt", self.folder / "client.key"
        return f"ssl_ca_certs={self.authority}&ssl_certfile={crt}&ssl_keyfile={key}"


_REQUEST = """
[req]
prompt = no
distinguished_name = subject
x509_extensions = extensions
[subject]
CN = {name}
[extensions]
basicConstraints = critical, CA:{authority}
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
{more}
"""


def _certificate(path: Path, more: str, *signed: str | Path, authority: bool = False) -> None:
    request, key = path.with_suffix(".cnf"), path.with_suffix(".key")
    said = _REQUEST.format(name=path.stem, authority=str(authority).upper(), more=more)
    request.write_text(said, encoding="utf-8")
    command = ["openssl", "req", "-x509", "-config", request, "-newkey", "rsa:2048", "-nodes"]
    command += ["-days", "1", "-keyout", key, "-out", path, *signed]
    subprocess.run(command, check=True, capture_output=True, timeout=patience_s())
