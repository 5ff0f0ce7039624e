"""Complete runs in one process: real membership, SMPs and messages.

Time, network and faults are simulated. One seed determines a run. No module here reads a clock,
draws random numbers outside the streams of the world, or iterates over a set without sorting it.
The same seed gives the same run on every machine.

    scenario.py    what a seed determines: nodes, settings, duration, number of faults
    world.py       virtual time, streams of random numbers, the trace
    network.py     TCP-like connections between agents; links that are slow, cut, one-way
    memory.py      the memory of one node: slots of its ranks, protected parts of other nodes
    links.py       links between SMPs, which are reset, cut and refused
    snapshots.py   an SMP: its own code, with time, links and bytes of the simulation
    smp_link.py    an agent's client of its SMP
    training.py    ranks: a step completes when all ranks of one generation are in it
    node.py        a machine, its stub, and an agent process: a real Member and its executor
    probes.py      probes of the paths between rails
    faults.py      faults, and when they occur
    mishaps.py     clocks, firewalls, threads, ranks that do not die, checkpoints that do not load
    witness.py     the witness, and how it fails
    plots.py       sequences of faults that random faults rarely produce
    invariants.py  invariants that are checked after every event
    run.py         one seed from beginning to end, and its outcome
    sweep.py       runs of many seeds, for the tests
    traffic.py     a run without faults on many nodes: its cost
"""
