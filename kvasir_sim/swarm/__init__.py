"""A simulated swarm of expert workers beside the ring, driven by the core's coordinator and hub.

    ring stage --router--> coordinator --parts--> workers        (`overlap`, `calls`, `worker`)
    worker --volunteers, heartbeats--> hub --claims, generations (`worker`, `hub_shell`)

Every decision is the core's (`kvasir_core.swarm`); here are time, bytes, honesty and faults.
"""
