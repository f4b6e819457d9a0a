"""Builds the whole gateway from its configuration."""

from collections.abc import Callable

from gateway.config.settings import Settings
from gateway.http.responses import ResponsesRerun
from gateway.wiring.backends import MakeEnginePool
from gateway.wiring.batches import make_lines
from gateway.wiring.core import make_core
from gateway.wiring.observing import make_metrics
from gateway.wiring.running import Gateway
from gateway.wiring.services import make_admission_admin, make_services
from gateway.wiring.serving import make_serving
from observability.events import RequestRecord


def build(
    settings: Settings,
    *,
    admin_key: str | None,
    observe: Callable[[RequestRecord], None] | None = None,
    engine_pool: MakeEnginePool | None = None,
    dropped_log_lines: Callable[[], int] | None = None,
) -> Gateway:
    """Construct a gateway.

    Args:
        admin_key: the first admin key (``SLUICE_ADMIN_KEY``).
        observe: also receives the record of each finished request (benchmarks).
        engine_pool: makes the backends of kind ``engine`` if their engines run elsewhere (Ray).
        dropped_log_lines: returns the number of log lines that this process has dropped, for its metrics.

    Raises:
        ConfigError, RoutingFileError, RegistryFileError, PromptFileError, TokenizerError: something that the
            configuration names cannot be used; the message can be printed as it is.
    """
    core = make_core(settings, admin_key, engine_pool)
    serving = make_serving(core, observe)
    admission = make_admission_admin(core)
    metrics = make_metrics(core, serving, admission, dropped_log_lines)
    services = make_services(core, serving, admission, metrics)
    serving.background.rerun = ResponsesRerun(services)
    serving.batches.runner.lines = make_lines(core, services, serving.journey, serving.embeddings)
    return Gateway(core, serving, services)
