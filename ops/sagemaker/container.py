"""The container's contract: converts SageMaker's environment to configuration.

SageMaker runs ``IMAGE serve``, calls ``GET /ping`` and ``POST /invocations`` on port 8080, and stops the
container with SIGTERM, 30 seconds before SIGKILL.
"""

from collections.abc import Mapping
from pathlib import Path

from gateway.config.errors import ConfigError

PORT = 8080  # the port that the platform calls, unless SAGEMAKER_BIND_TO_PORT is set (inference pipelines)
DRAIN_S = 20
"""Part of the 30 seconds between SIGTERM and SIGKILL; the rest is for the engine and the last usage rows."""
MODEL_FOLDER = Path("/opt/ml/model")  # where the platform puts the data of the model's ``ModelDataSource``
ENDPOINT_ENV = "SLUICE_SAGEMAKER_ENDPOINT"
VARIANT_ENV = "SLUICE_SAGEMAKER_VARIANT"
VARIANT = "main"

# Python's log levels, which SageMaker's own containers use.
_LOG_LEVELS = {"10": "debug", "20": "info", "30": "warning", "40": "error", "50": "error"}


def container_environment(environ: Mapping[str, str], *, model_folder: Path = MODEL_FOLDER) -> dict[str, str]:
    """The environment with which the gateway starts; variables that are already set take precedence.

    Keys are off: only SageMaker reaches the port, after IAM, and it does not forward Authorization. Raises
    ConfigError for a multi-model endpoint.
    """
    if environ.get("SAGEMAKER_MULTI_MODEL", "").lower() == "true":
        raise ConfigError(
            "SAGEMAKER_MULTI_MODEL is true: multi-model endpoints are not served; allowed: single-model "
            "endpoints, with LoRA adapters from the registry for variants of the model"
        )
    ours = {
        "SLUICE_SERVER__HOST": "0.0.0.0",
        "SLUICE_SERVER__PORT": environ.get("SAGEMAKER_BIND_TO_PORT") or str(PORT),
        "SLUICE_SERVER__PING": "once_ready",
        "SLUICE_SERVER__DRAIN_SECONDS": str(DRAIN_S),
        "SLUICE_SERVER__LOG_JSON": "true",
        "SLUICE_AUTH__ENABLED": "false",
    }
    if (model_folder / "config.json").is_file():
        ours["SLUICE_ENGINE__MODEL"] = str(model_folder)
    return {**ours, **environ}


def log_level(environ: Mapping[str, str]) -> str:
    """The level of SAGEMAKER_CONTAINER_LOG_LEVEL; ``info`` if it is unset or unknown."""
    return _LOG_LEVELS.get(environ.get("SAGEMAKER_CONTAINER_LOG_LEVEL", ""), "info")
