"""The layers below the serving layer, built in order: each uses only those before it."""

from dataclasses import dataclass

from gateway.config.settings import Settings
from gateway.wiring.access import AccessParts, make_access, require_first_key
from gateway.wiring.accounts import AccountParts, make_accounts
from gateway.wiring.adapters import AdapterParts, make_adapters
from gateway.wiring.backends import BackendParts, MakeEnginePool, make_backends
from gateway.wiring.control import ControlParts, make_control
from gateway.wiring.foundation import Foundation, make_foundation
from gateway.wiring.generation import GenerationParts, make_generation
from gateway.wiring.model import ModelParts, make_model


@dataclass(frozen=True, slots=True)
class Core:
    """The layers, in their order; each field is documented in its own file."""

    base: Foundation
    model: ModelParts
    access: AccessParts
    adapters: AdapterParts
    backends: BackendParts
    accounts: AccountParts
    control: ControlParts
    generation: GenerationParts


def make_core(settings: Settings, admin_key: str | None, engine_pool: MakeEnginePool | None) -> Core:
    """Build the layers. Raises the errors of :func:`gateway.wiring.build.build`."""
    require_first_key(settings, admin_key)
    base = make_foundation(settings)
    model = make_model(base)
    access = make_access(base, admin_key)
    adapters = make_adapters(base)
    backends = make_backends(base, model, adapters, engine_pool)
    accounts = make_accounts(base, backends.engines)
    control = make_control(base, model, adapters, backends)
    generation = make_generation(base, model, backends, accounts)
    return Core(
        base=base,
        model=model,
        access=access,
        adapters=adapters,
        backends=backends,
        accounts=accounts,
        control=control,
        generation=generation,
    )
