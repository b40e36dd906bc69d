// The tip with the probabilities of the token under the pointer or the focus.
const tokenTip = (() => {
  "use strict";
  const { OUT, DRAFT, ORIGINS, ORIGIN_MEANING, OUTCOME_MEANING } = tokens;
  const { make, spell, node, percent, probabilityBar } = tokens;
  const tip = document.getElementById("tip"), box = document.getElementById("text");
  let token = null;

  function fill(round, strings) {
    const [out, draft] = round, rejected = token.tagName === "DEL";
    const values = rejected
      ? node(draft, token.dataset.i, DRAFT)
      : node(out, token.dataset.i, OUT);
    const [string, id, origin, target, drafted, rank] = values;
    const title = make("strong"), grid = make("div");
    const add = (name, text, last) => grid.append(name, make("span", "p", text), last);
    spell(title, strings[string], id, true);
    add("target", percent(target), probabilityBar(target, "target"));
    if (rejected || origin === 0 || drafted !== null) {
      add("drafter", percent(drafted), probabilityBar(drafted, "draft"));
    }
    add("rank", rank === null ? "–" : rank + 1, rank === 0 ? "most probable" : "");
    const meaning = rejected ? OUTCOME_MEANING.rejected : ORIGIN_MEANING[ORIGINS[origin]];
    tip.replaceChildren(title, make("em", "", `${meaning}; id ${id}`), grid);
  }
  function show(element, rounds, strings) {
    if (!element || element === token) return;
    hide();
    token = element;
    fill(rounds[element.parentElement.dataset.r], strings);
    tip.hidden = false;
    element.classList.add("on");
    element.setAttribute("aria-describedby", "tip");
    place();
  }
  // Moves the tip to its token; hides it if the token is scrolled out of sight.
  function place() {
    if (!token) return;
    const at = token.getClientRects()[0], size = tip.getBoundingClientRect();
    const view = box.getBoundingClientRect();
    const low = Math.max(0, view.top), high = Math.min(innerHeight, view.bottom);
    if (!at || at.bottom < low || at.top > high) return hide();
    const above = at.top - size.height - 8, top = above >= 8 ? above : at.bottom + 8;
    const right = document.documentElement.clientWidth - size.width - 8;
    tip.style.left = `${Math.max(8, Math.min(at.left, right))}px`;
    tip.style.top = `${Math.max(8, Math.min(top, innerHeight - size.height - 8))}px`;
  }
  function hide() {
    token?.classList.remove("on");
    token?.removeAttribute("aria-describedby");
    token = null;
    tip.hidden = true;
  }

  return { show, place, hide };
})();
