// What the tokens of a trace are, and how they are spelt: flat lists of OUT or DRAFT values a token.
const tokens = (() => {
  "use strict";
  const OUT = 6, DRAFT = 7;
  const ORIGINS = ["accepted", "residual", "bonus", "plain"];
  const SAYS = {
    accepted: "accepted draft token", residual: "the target's own token, after a rejection",
    bonus: "the target's own token, after a whole draft was accepted", plain: "the target's own token, nothing was drafted",
    kept: "draft token, accepted", refused: "draft token, rejected", unreached: "draft token, never reached",
  };

  const make = (tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // A token as text in which white space and characters without a shape can be seen; U+200C and U+200D join letters and emoji.
  const HIDDEN = /(?![ \u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Z}]|^[\u200c\u200d]+$/u;
  const GLYPHS = { "\n": "↵", "\t": "→" };
  function spell(into, text, id, flat) {
    if (text === "") return into.append(make("i", "ws code", `#${id}`)); // half a character, or a token without text
    if (/^ +$/.test(text)) return into.append(make("i", "dots", text));
    if (/^ [^ ]/.test(text)) { // a word is not torn from its space
      into.append("\u00a0");
      text = text.slice(1);
    }
    if (!HIDDEN.test(text)) return into.append(text);
    let plain = "";
    for (const c of text) {
      if (!HIDDEN.test(c) || (c !== text && /[\u200c\u200d]/.test(c))) { plain += c; continue; }
      const glyph = GLYPHS[c] ?? `U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
      into.append(plain, make("i", GLYPHS[c] ? "ws" : "ws code", glyph), GLYPHS[c] && !flat ? c : "\u200b"); // a line may break here
      plain = "";
    }
    into.append(plain);
  }

  const node = (flat, place, width) => flat.slice(place * width, (place + 1) * width);
  const percent = (p) => (p === null ? "–" : p === 0 ? "0 %" : p < 0.001 ? p.toExponential(0) : `${Number((100 * p).toPrecision(3))} %`);
  function chance(p, name) {
    const bar = make("span", `chance ${name}`);
    bar.append(make("b"));
    bar.firstChild.style.width = `${100 * (p ?? 0)}%`;
    return bar;
  }

  // What became of each drafted token: kept; refused where the target's own token came in; never reached.
  function fates([out, draft]) {
    const count = draft.length / DRAFT, fate = [];
    let last = -1;
    for (let i = 0; i < count; i++) if (draft[i * DRAFT + 6]) last = i;
    const own = out.length ? out[out.length - OUT + 2] : 3;
    for (let i = 0; i < count; i++) {
      const parent = draft[i * DRAFT + 2];
      fate.push(draft[i * DRAFT + 6] ? "kept" : own === 1 && parent === last ? "refused" : "unreached");
    }
    return fate;
  }
  const isTree = (draft) => { for (let i = 0; i * DRAFT < draft.length; i++) if (draft[i * DRAFT + 2] !== i - 1) return true; return false; };
  function summary(round) {
    const [out, draft] = round, count = draft.length / DRAFT;
    const kept = fates(round).filter((fate) => fate === "kept").length;
    const own = out.length ? ORIGINS[out[out.length - OUT + 2]] : null;
    const last = own === null ? "no token" : own === "accepted" ? "the text ends there" : `${own} token`;
    if (!count) return `nothing drafted, ${last}`;
    return `${kept} of ${count} draft${count === 1 ? "" : "s"} accepted${isTree(draft) ? " (a tree)" : ""}, ${last}`;
  }

  return { OUT, DRAFT, ORIGINS, SAYS, make, spell, node, percent, chance, fates, isTree, summary };
})();
