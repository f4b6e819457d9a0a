"""Size of the embedded engine: lines of code without docstrings, comments and blank lines.

python -m benchmarks.engine_lines
"""

import ast
import io
import tokenize
from pathlib import Path

ENGINE = Path(__file__).resolve().parent.parent / "engine"
PARTS = {
    "schedules, computes, updates": (
        *("sequence", "prefix_cache", "block_pool", "scheduler", "attention", "operators", "lora"),
        *("model", "penalties", "structured", "sampler", "memory", "runner", "text", "engine"),
    ),
    "the same for one device": ("threads", "kernels", "fused", "graphs"),
    "loads and checks": ("loader", "lora_loader", "kv_pool", "build", "adapter_commands"),
    "process boundary and values": ("values", "errors", "limits", "wire", "process", "client"),
}
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def count_code(source: str) -> int:
    """Count the lines of ``source`` that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def main() -> None:
    """Prints the lines of each file and of each part."""
    counts = {path.stem: count_code(path.read_text()) for path in sorted(ENGINE.glob("*.py"))}
    for part, names in PARTS.items():
        print(f"{sum(counts[name] for name in names):6,}  {part}")
        for name in names:
            print(f"{counts[name]:10,}  {name}.py")
    print(f"{sum(counts.values()):6,}  all")


if __name__ == "__main__":
    main()
