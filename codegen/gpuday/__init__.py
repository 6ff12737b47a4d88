"""Spend one day, or seven minutes, on a GPU: run every check and measurement that needs one, and write one report.

python -m flashsmith.gpuday --out DIR           all parts; those that are done already are not run again
python -m flashsmith.gpuday --out DIR --fresh   from the start
"""
