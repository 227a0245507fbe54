"""Tables, plots and files made from plain rows. Nothing here measures anything or knows a model.

    result     write, read and validate result.json and rows.csv; config_hash; provenance
    stats      Wilson, paired bootstrap, McNemar, perplexity interval
    pareto     the non-dominated set
    columns    what a column is called, how its number is printed, which columns fit
    table      terminal, markdown, csv, LaTeX
    points     the numbers behind each picture; plots draws them; style says in which colour; labels where text goes
    compare    two results, paired;  verify  one result, run again;  combine  many results, one report

Import the module you need (`from kvlab.report import table`): importing the package itself loads nothing, and
matplotlib, rich and jsonschema are loaded by the function that uses them.
"""
