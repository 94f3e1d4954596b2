"""Entry point: `python -m skyrl_mega.preflight --config FILE [group.key=value …] [--json]`."""

from skyrl_mega.cluster import driver

if __name__ == "__main__":
    driver.start("the same command checks again")
    from skyrl_mega.cli.preflight import main  # these imports are only needed in the driver

    driver.run(main)
