"""Ray shells over plain classes: engine, ranks, the channels between them, placement, health.

Plain (no Ray)                            Ray
    openmp          how threads wait
    core            one running engine        engine          Serve replica or actor around a core
    channel, merge, wire, listener            ranks, rank     rank actors: place, prepare, kill
    rank_loop       a rank's side             placement       nodes, placement groups, pre-flight
    thread_channel, inprocess                 directory       engines of an application in the KV
    stream, stream_receiver, masks            launch          an engine without Serve
    preflight, vocabulary
"""
