// Cells of tables that spreadsheets must not take for formulas, as in labelling/tables.py, which can undo it.

const START = /(^|[;,|"\x00-\x1f])('*)(?=[=+\-@\uff1d\uff0b\uff0d\uff20])/g;

export const guarded = (text) => text.replace(START, "$1$2'");
