"""Reports over the ranks of a job: times of each rank's step, waits between ranks, and the critical path across them.

    from step_views.reports.ranks.report import rank_report
    from step_views.reports.ranks.times import recorded_times

    rank_report(recorded_times(replay(tracer.read_job("dlrm/").graphs))).ranks[3].waiting_ns
"""
