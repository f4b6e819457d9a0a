"""Starts `sluice`, also as `python -m ops.cli`."""

from ops.cli.interrupts import ended_by_ctrl_c


def main() -> None:
    with ended_by_ctrl_c():
        from ops.cli.main import main as run
    run()


if __name__ == "__main__":
    main()
