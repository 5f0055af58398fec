"""What is done with a trained model: post-training, analysis, and their commands, which run as
`python -m lab.NAME`. Nothing in longhaul/ imports it.
"""
