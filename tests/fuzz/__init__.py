"""The property fuzz: random optimizers over random memory, against float64 with an error bound.

`./run.sh fuzz` runs it. `choices` draws a case from a seed, `run` steps through it, `oracle` says
what each step has to give, `shrink` makes a failing case small. `composites` draws the cases of
RowWiseAdagrad, SparseAdam and Adafactor, whose states or gradients have other forms, and
`properties` steps through these. `events` draws trainings with changes between their steps, in
which steps in the backward pass and offloaded ones follow the plain optimizer.
"""
