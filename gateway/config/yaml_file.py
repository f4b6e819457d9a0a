"""Reads YAML files of operators into pydantic models; a fault names the file, the key and what was given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

# Large enough for thousands of entries, too small for most files given by mistake.
MAX_FILE_BYTES = 1 << 20
# Longest part of a wrong value in a message.
MAX_SHOWN = 60

ModelT = TypeVar("ModelT", bound=BaseModel)


class UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a repeated key, where YAML's own silently uses the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping; raises ConstructorError at the second of two equal keys."""
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {shown(key.value)} is given twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def read_yaml(
    path: Path, model: type[ModelT], error_type: Callable[[str], Exception], *, if_empty: object = None
) -> ModelT:
    """The file's content. Raises ``error_type``, with a line for each fault; ``if_empty`` is what an empty
    file stands for.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise error_type(f"{path}: longer than {MAX_FILE_BYTES:,} bytes, the most that is allowed")
        data = yaml.load(raw.decode("utf-8-sig"), Loader=UniqueKeyLoader)
    except OSError as error:
        raise error_type(f"{path}: cannot be read: {error.strerror or type(error).__name__}") from None
    except UnicodeDecodeError as error:
        raise error_type(f"{path}: byte {error.start} is not UTF-8; allowed: UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise error_type(f"{path}{where}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise error_type(f"{path}: not valid YAML: {type(error).__name__}") from None
    try:
        return model.model_validate(if_empty if data is None else data)
    except ValidationError as error:
        lines = (_line(fault) for fault in error.errors(include_url=False))
        raise error_type("\n".join(f"{path}: {line}" for line in lines)) from None


def shown(value: object) -> str:
    """A value in a message, shortened."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _line(fault: Any) -> str:
    key = ".".join(str(part) for part in fault["loc"] if part != "[key]")
    if fault["type"] == "value_error":  # the message of a check of ours says what was given
        return f"{key}: {fault['ctx']['error']}" if key else str(fault["ctx"]["error"])
    given = "" if fault["type"] == "missing" else f"; given: {shown(fault['input'])}"
    return f"{key or 'the file'}: {fault['msg']}{given}"
