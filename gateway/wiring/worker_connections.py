"""Builds a pool's connections to its workers: key, headers, TLS, proxy."""

import ssl
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]  # typeshed lacks it

from gateway.backends.workers.api_key import ApiKey, UnusableKey
from gateway.backends.workers.client import WorkerClient
from gateway.backends.workers.header_template import HeaderTemplate
from gateway.backends.workers.proxy import Proxy
from gateway.config.backends import PROXY_FROM_ENVIRONMENT, OpenAIBackend, TlsSection
from gateway.config.errors import ConfigError

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class WorkerConnections:
    """What the clients of a pool share; ``templates`` are headers that differ by request."""

    key: ApiKey
    templates: tuple[HeaderTemplate, ...]
    client: Callable[[str, int, float], WorkerClient]


def check_key_variables(backends: Mapping[str, object], environ: Mapping[str, str]) -> None:
    """Raise ConfigError with all variables of keys that are not set."""
    faults = [
        f"backends.{name}.api_key_env: the variable {variable} is not set; set it, or leave the key out"
        for name, section in backends.items()
        if isinstance(section, OpenAIBackend)
        and (variable := section.api_key_env) is not None
        and not environ.get(variable)
    ]
    if faults:
        raise ConfigError("\n".join(faults))


def make_connections(
    name: str, section: OpenAIBackend, headers: Headers, environ: Mapping[str, str]
) -> WorkerConnections:
    """Read the key, whose variable is set, and the certificates; nothing connects yet. Raises ConfigError."""
    place = f"backends.{name}"
    urls = [url.rstrip("/") for url in section.base_urls]
    fixed = tuple((key, value) for key, value in section.headers.items() if "{" not in value)
    templates = tuple(HeaderTemplate(*one) for one in section.headers.items() if one not in fixed)
    key = _key(place, section, environ)
    tls = _tls(f"{place}.tls", section.tls) if any(url.startswith("https:") for url in urls) else None
    proxies = {url: _proxy(f"{place}.proxy", section.proxy, url, environ) for url in urls}

    def client(url: str, max_connections: int, connect_s: float) -> WorkerClient:
        return WorkerClient(
            url,
            section,
            max_connections=max_connections,
            connect_s=connect_s,
            key=key,
            headers=headers + fixed,
            context=tls,
            proxy=proxies[url],
        )

    return WorkerConnections(key, templates, client)


def _key(place: str, section: OpenAIBackend, environ: Mapping[str, str]) -> ApiKey:
    variable, file = section.api_key_env, section.api_key_file
    try:
        return ApiKey(environ[variable] if variable else None, Path(file) if file else None)
    except UnusableKey as error:
        where = f"api_key_env: {variable}" if variable else f"api_key_file: {file}"
        raise ConfigError(f"{place}.{where}: the key cannot be used: {error}") from None


def _tls(place: str, section: TlsSection) -> ssl.SSLContext:
    for key in ("ca_file", "cert_file", "key_file"):
        path = getattr(section, key)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{place}.{key}: {path} is no file")
    key = "ca_file"
    try:
        context = ssl.create_default_context(cafile=section.ca_file)
        if section.cert_file is not None:
            key = "cert_file" if section.key_file is None else "key_file"
            # Without a password function OpenSSL would ask for a password at the terminal.
            context.load_cert_chain(section.cert_file, section.key_file, password=lambda: "")
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or type(error).__name__
        raise ConfigError(
            f"{place}.{key}: {getattr(section, key)} cannot be used: {why}; PEM without a password is allowed"
        ) from None
    return context


def _proxy(place: str, proxy: str | None, url: str, environ: Mapping[str, str]) -> Proxy | None:
    """Return the proxy for a worker. The environment's HTTPS_PROXY applies only to ``https://`` workers."""
    if proxy == PROXY_FROM_ENVIRONMENT:
        target = urlsplit(url)
        bypass = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
        proxy = environ.get("https_proxy") or environ.get("HTTPS_PROXY")
        if target.scheme != "https" or proxy_bypass_environment(target.netloc, {"no": bypass}):
            return None
    if not proxy:
        return None
    try:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        port = parts.port or (443 if parts.scheme == "https" else 3128)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{place}: HTTPS_PROXY is no address; allowed: http://[USER:PASSWORD@]HOST:PORT"
        ) from None
    authorization = b""
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        authorization = b"proxy-authorization: Basic " + b64encode(pair) + b"\r\n"
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return Proxy(parts.hostname, port, tls, authorization)
