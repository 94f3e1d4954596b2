"""The live page: a run's report while the run is under way, with alarms and metrics for Prometheus.

`process.py` is the driver's side. `server.py` is the process that serves; it only reads the run's folder. `snapshot.py`
renders a snapshot when a file changed, and `server.py` sends its bytes. `access.py` holds token and limits.
"""
