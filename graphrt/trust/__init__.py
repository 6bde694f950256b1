"""Whether a graph still stands for its forward: watching warm-ups, trying graphs, checks.

To read it, begin with `graphrt/core/runner/contract.py`, which says what a runner asks. Then:

1. runner_checks.py answers for a runner: `RunnerChecks`. checks.py decides: `Checks` says which
   steps are replayed, tried or run eagerly, and keeps what trials have found.
2. warm_up.py: `WatchedState` runs the warm-ups of a capture session. watching/ sees their
   operators: `Watch` what they read and write, `SavedWrites` keeps what was there before,
   `PaddingRows` the rows that padding writes.
3. trial.py: `Trial` runs one step several times and compares. trials.py has the runs: of a runner's
   step (`StepRuns`) and of a wrapper's call (`WrapperStep`); `WrapperTrials` is the checker of a
   wrapper. verdict.py has the errors, snapshot.py what is put back between runs.
4. places/ walks through Python from the forward. picture.py compares what the walk found with now.
   reads.py (`ReadSet`) knows which of it graphs read, host_watch.py what the host has changed, and
   glances.py what a step compares of it.
"""
