// The table of one round's draft: its nodes as a tree, and the target's own token.
const draftTable = (() => {
  "use strict";
  const { OUT, DRAFT, ORIGINS, ORIGIN_MEANING, OUTCOME_MEANING } = tokens;
  const { make, spell, node, percent, probabilityBar, outcomes, isTree } = tokens;
  const SIGNS = { accepted: "✓", rejected: "✗", unreached: "", own: "+" };

  // A row for a draft node (`kind` is its outcome) or for the target's own token (`kind` is "own").
  function addRow(body, strings, draft, values, kind, branch) {
    const [string, id, link, target, drafted, rank] = values;
    const row = body.insertRow(), cell = row.insertCell();
    row.className = kind;
    const origin = kind === "own" ? ORIGINS[link] : kind === "unreached" ? "" : kind;
    const chip = make(kind === "rejected" ? "del" : "span", origin && `t ${origin}`);
    spell(chip, strings[string], id, true);
    cell.append(make("span", "sign", SIGNS[kind]), make("span", "line", branch), chip);
    const meaning = kind === "own" ? ORIGIN_MEANING[ORIGINS[link]] : OUTCOME_MEANING[kind];
    const parent = link < 0 ? "the pending token" : `“${strings[draft[link * DRAFT]]}”`;
    row.title = `${meaning}; id ${id}${kind === "own" ? "" : `; follows ${parent}`}`;
    row.insertCell().append(percent(target), probabilityBar(target, "target"));
    row.insertCell().append(percent(drafted), probabilityBar(drafted, "draft"));
    row.insertCell().append(rank === null ? "–" : rank + 1);
    return row;
  }

  function childrenOf(draft) {
    const children = new Map();
    for (let i = draft.length / DRAFT - 1; i >= 0; i--) {
      const parent = draft[i * DRAFT + 2];
      children.set(parent, [...(children.get(parent) ?? []), i]);
    }
    return children;
  }

  return (round, strings) => {
    const [out, draft] = round, outcome = outcomes(round), tree = isTree(draft);
    const table = make("table", "tree");
    const head = table.createTHead().insertRow(), body = table.createTBody();
    for (const text of ["draft", "target", "drafter", "rank"]) {
      head.append(Object.assign(make("th", "", text), { scope: "col" }));
    }
    const children = childrenOf(draft);
    const stack = (children.get(-1) ?? []).map((i, k) => [i, "", k === 0]);
    while (stack.length) {
      const [i, before, last] = stack.pop();
      const branch = tree ? before + (last ? "└ " : "├ ") : "";
      const row = addRow(body, strings, draft, node(draft, i, DRAFT), outcome[i], branch);
      row.dataset.node = i;
      const below = before + (last ? " " : "│");
      (children.get(i) ?? []).forEach((child, k) => stack.push([child, below, k === 0]));
    }
    if (out.length && out[out.length - OUT + 2] !== 0) {
      addRow(body, strings, draft, node(out, out.length / OUT - 1, OUT), "own", "");
    }
    return table;
  };
})();
