"""`specter bench`: modes of decoding against each other, in turn, on the same prompts, at the same memory.

A cell is a budget of device memory and a link. Within a cell every mode has an engine process, and each step of the
schedule has all of them reply to the same prompt, one at a time. What is measured is seen from here, at the client:
arrivals of tokens, and the counters that come with them.

    command                     from options to output               run        prepare, then cell after cell
    modes, budgets, links,      what is compared                     cell       one cell: its engines and its replies
    prompts, schedule
    engine, pool, cgroup        processes, and what they may hold    reply      one reply, and when its tokens came
    measures, ratios, bounds    pure statistics
    tables, report, trace,      what is told
    plots
"""
