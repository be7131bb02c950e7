"""Weights: the published versions of the policy, in a store that trainer and engines share.

`store` (objects with conditional create), `manifests` (what lies where, and which versions survive), `publish` (the
protocol), `background` (so that the trainer waits for the snapshot only), `subscribe` (readers), `gc`, `verify`.
numpy alone: a tensor is bytes with a safetensors dtype name, and no room here knows what a network is.
"""
