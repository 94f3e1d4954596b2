"""`python -m skyrl_mega.export RUN --output DIR [--step N] [--dtype …] [--workers N] [--from master] [--verify]`."""

from skyrl_mega.cluster import driver

if __name__ == "__main__":
    driver.start("nothing is left of it, and the same command begins again")
    from skyrl_mega.cli.export import main  # imported late: only the driver needs its packages

    driver.run(main)
