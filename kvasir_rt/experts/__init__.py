"""The stage's side of remote experts: what is sent, who answers, how it enters the sum.

    local = load_local(gguf, (start, stop), numerics)        # the fallback, and what checks use
    caller = ExpertCaller(CallerOptions(...), local)
    caller.start()                                           # its own thread: hub, relay, timers
    model = StageModel(..., experts=RemoteExpertBackend(caller))
    ...
    caller.close()

`StageModel.forward` waits for each layer's experts. A stage that computes other micro-batches
meanwhile uses `StageModel.begin`, parks a `RemoteCall` until `is_due` (`on_news` wakes it from
another thread), and reports with `caller.measure(blocked_ns=...)` the time in which everything it
held was parked.
"""
