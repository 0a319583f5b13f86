"""Run as a program: a Ray cluster of two nodes on this machine, one processor each.

Says its address as a line of JSON. ``lose`` on stdin kills the second node without a word, ``join`` starts another one,
the end of stdin ends the cluster.
"""

import json
import shutil
import sys
import tempfile

from ray.cluster_utils import Cluster

_NODE = {"num_cpus": 1, "memory": 2 << 30, "object_store_memory": 80 << 20}


def main() -> None:
    """Serve until stdin ends."""
    folder = tempfile.mkdtemp(prefix="ray")  # short: paths of sockets have a limit
    cluster = Cluster(initialize_head=True, head_node_args={**_NODE, "include_dashboard": False, "temp_dir": folder})
    other = cluster.add_node(**_NODE)
    try:
        _say({"address": cluster.address})
        for line in sys.stdin:
            if line == "lose\n":
                cluster.remove_node(other, allow_graceful=False)
            elif line == "join\n":
                other = cluster.add_node(**_NODE)
            _say({"nodes": len(cluster.list_all_nodes())})
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _say(value: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
