"""A private certificate authority, and a proxy that tunnels."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """A certificate authority that writes its certificates into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        self.ca_file = self._write("ca.pem", self._signed(self._name, self._key, None))

    def pair(self, name: str, *addresses: str) -> tuple[str, str]:
        """Write a new certificate and its key, and return their paths."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = [x509.DNSName(name), *(x509.IPAddress(ipaddress.ip_address(one)) for one in addresses)]
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        certificate = self._write(f"{name}.pem", self._signed(subject, key, names))
        (self._folder / f"{name}.key").write_bytes(private)
        return certificate, str(self._folder / f"{name}.key")

    def server(self, name: str, *addresses: str, clients: bool = False) -> ssl.SSLContext:
        """A server's TLS context; with ``clients`` it requires client certificates of this authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.pair(name, *addresses))
        if clients:
            context.load_verify_locations(self.ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, names: list[x509.GeneralName] | None
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=names is None, path_length=None), critical=True)
        )
        if names is not None:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)

    def _write(self, name: str, content: bytes) -> str:
        (self._folder / name).write_bytes(content)
        return str(self._folder / name)


@dataclass
class TunnelProxy:
    """A proxy that takes CONNECT only and answers ``status``; it connects to 127.0.0.1 for every name."""

    status: int = 200
    heads: list[str] = field(default_factory=list)
    port: int = 0

    @contextlib.asynccontextmanager
    async def running(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[TunnelProxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            writer.write(f"HTTP/1.1 {self.status} X\r\n\r\n".encode())
            if self.status == 200:
                port = int(head.split(" ")[1].rpartition(":")[2])
                there, back = await asyncio.open_connection("127.0.0.1", port)
                async with asyncio.TaskGroup() as both:
                    both.create_task(_copy(reader, back))
                    both.create_task(_copy(there, writer))
        writer.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    target.close()
