// The tokens of a trace and their texts. A round is two flat lists: OUT values per emitted token,
// DRAFT values per node of the draft.
const tokens = (() => {
  "use strict";
  const OUT = 6, DRAFT = 7;
  const ORIGINS = ["accepted", "residual", "bonus", "plain"];
  const ORIGIN_MEANING = {
    accepted: "accepted draft token",
    residual: "the target's own token, after a rejection",
    bonus: "the target's own token, after a whole draft was accepted",
    plain: "the target's own token, nothing was drafted",
  };
  const OUTCOME_MEANING = {
    accepted: "draft token, accepted",
    rejected: "draft token, rejected",
    unreached: "draft token, not reached",
  };

  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // White space and characters without a shape, which are made visible. U+200C and U+200D stay
  // where they join letters and emoji.
  const HIDDEN = /(?![ \u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Z}]|^[\u200c\u200d]+$/u;
  const GLYPHS = { "\n": "↵", "\t": "→" };
  const codeOf = (c) => `U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

  // Appends the visible text of a token. `flat` leaves line feeds and tabs out.
  function spell(into, text, id, flat) {
    // Part of a character, or a token without text.
    if (text === "") return into.append(make("i", "ws code", `#${id}`));
    if (/^ +$/.test(text)) return into.append(make("i", "dots", text));
    if (/^ [^ ]/.test(text)) { // no line break between a word and its space
      into.append("\u00a0");
      text = text.slice(1);
    }
    if (!HIDDEN.test(text)) return into.append(text);
    let plain = "";
    for (const c of text) {
      if (!HIDDEN.test(c) || (c !== text && /[\u200c\u200d]/.test(c))) {
        plain += c;
        continue;
      }
      const glyph = make("i", GLYPHS[c] ? "ws" : "ws code", GLYPHS[c] ?? codeOf(c));
      into.append(plain, glyph, GLYPHS[c] && !flat ? c : "\u200b"); // a line may break here
      plain = "";
    }
    into.append(plain);
  }

  const node = (flat, index, width) => flat.slice(index * width, (index + 1) * width);
  const percent = (p) => {
    if (p === null) return "–";
    if (p === 0) return "0 %";
    return p < 0.001 ? p.toExponential(0) : `${Number((100 * p).toPrecision(3))} %`;
  };
  function probabilityBar(p, className) {
    const bar = make("span", `probability ${className}`);
    bar.append(make("b"));
    bar.firstChild.style.width = `${100 * (p ?? 0)}%`;
    return bar;
  }

  // The outcome of each draft node: accepted; rejected (a child of the last accepted node, in a
  // round that ends with a residual token); unreached.
  function outcomes([out, draft]) {
    const count = draft.length / DRAFT, result = [];
    let last = -1;
    for (let i = 0; i < count; i++) if (draft[i * DRAFT + 6]) last = i;
    const origin = out.length ? out[out.length - OUT + 2] : 3;
    for (let i = 0; i < count; i++) {
      const parent = draft[i * DRAFT + 2];
      const rejected = origin === 1 && parent === last;
      result.push(draft[i * DRAFT + 6] ? "accepted" : rejected ? "rejected" : "unreached");
    }
    return result;
  }
  const isTree = (draft) => {
    for (let i = 0; i * DRAFT < draft.length; i++) if (draft[i * DRAFT + 2] !== i - 1) return true;
    return false;
  };
  function summary(round) {
    const [out, draft] = round, count = draft.length / DRAFT;
    const accepted = outcomes(round).filter((outcome) => outcome === "accepted").length;
    const origin = out.length ? ORIGINS[out[out.length - OUT + 2]] : null;
    const ends = origin === "accepted" ? "the text ends there" : `${origin} token`;
    const last = origin === null ? "no token" : ends;
    if (!count) return `nothing drafted, ${last}`;
    const drafts = `${accepted} of ${count} draft${count === 1 ? "" : "s"} accepted`;
    return `${drafts}${isTree(draft) ? " (a tree)" : ""}, ${last}`;
  }

  return {
    OUT, DRAFT, ORIGINS, ORIGIN_MEANING, OUTCOME_MEANING,
    make, spell, node, percent, probabilityBar, outcomes, isTree, summary,
  };
})();
