// The token traces. Rounds are shown in blocks, and only the blocks near the window of text are built: a trace may have 10^5 tokens.
(() => {
  "use strict";
  const box = document.getElementById("text");
  if (!box) return;
  const [pane, tip, slide, status, trouble] = ["draft", "tip", "slide", "status", "trouble"].map((id) => document.getElementById(id));
  const viewer = document.getElementById("viewer");
  const data = [...document.querySelectorAll("script.trace-data")];
  const go = Object.fromEntries([...viewer.querySelectorAll("[data-go]")].map((button) => [button.dataset.go, button]));
  const { OUT, DRAFT, ORIGINS, SAYS, make, spell, node, percent, chance, fates, isTree, summary } = tokens;
  const LEAST = 40, MOST = 120; // rounds of a block: it ends at a line feed if there is one in time
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  let trace, blocks, current = 0, unfolded = true, timer = 0, watch = null, hovered = null;

  function token(flat, place, width, name) {
    const made = make(name === "rejected" ? "del" : "span", `t ${name}`);
    made.dataset.i = place;
    made.tabIndex = -1;
    spell(made, trace.strings[flat[place * width]], flat[place * width + 1], name === "rejected");
    return made;
  }
  function build(number) {
    const [out, draft] = trace.rounds[number], made = make("span", "round");
    made.dataset.r = number;
    const kept = fates(trace.rounds[number]);
    if (draft.length) {
      const mark = make("button", "mark", kept.filter((fate) => fate === "kept").length);
      mark.type = "button";
      mark.tabIndex = -1;
      mark.setAttribute("aria-label", `Round ${number + 1}: ${summary(trace.rounds[number])}; show its draft`);
      made.append(mark);
    }
    const count = out.length / OUT;
    for (let i = 0; i < count; i++) {
      const origin = ORIGINS[out[i * OUT + 2]];
      if (origin === "residual" && i === count - 1) {
        const refused = kept.indexOf("refused"); // of several siblings the first; the draft's own window has them all
        if (refused >= 0) made.append(token(draft, refused, DRAFT, "rejected"));
      }
      made.append("\u200b", token(out, i, OUT, origin)); // lines break between tokens
    }
    return made;
  }

  function fill(block) {
    if (block.full) return;
    block.full = true;
    const above = block.element.offsetTop + block.element.offsetHeight <= box.scrollTop, before = above ? block.element.offsetHeight : 0;
    const fresh = document.createDocumentFragment();
    for (let r = block.start; r < block.end; r++) fresh.append(build(r));
    block.element.style.height = "";
    block.element.replaceChildren(fresh);
    if (above) box.scrollTop += block.element.offsetHeight - before; // what is being read stays where it is
  }
  function empty(block) {
    if (!block.full || (block.start <= current && current < block.end) || block.element.contains(document.activeElement)) return;
    block.element.style.height = `${block.element.offsetHeight}px`;
    block.full = false;
    block.element.replaceChildren();
  }

  function divide() {
    const lengths = trace.strings.map((text) => text.length), feeds = trace.strings.map((text) => text.includes("\n"));
    const wide = Math.max(20, Math.floor((box.clientWidth - 44) / 9)), found = [];
    let start = 0, size = 0, lines = 0;
    trace.rounds.forEach(([out], r) => {
      let feed = false;
      for (let i = 0; i < out.length; i += OUT) {
        size += lengths[out[i]];
        if ((feed = feeds[out[i]])) lines += 0.6;
      }
      size += 3;
      const long = r + 1 - start;
      if (long >= MOST || (long >= LEAST && feed) || r + 1 === trace.rounds.length) {
        const element = make("div", "block");
        element.style.height = `${Math.ceil(31 * (size / wide + lines + 0.5))}px`;
        found.push({ start, end: r + 1, element, full: false });
        element.block = found[found.length - 1];
        [start, size, lines] = [r + 1, 0, 0];
      }
    });
    return found;
  }

  function blockOf(number) {
    let low = 0, high = blocks.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (blocks[middle].start <= number) low = middle; else high = middle - 1;
    }
    return low;
  }
  const element = (number) => {
    const block = blocks[blockOf(number)];
    return block.full ? block.element.children[number - block.start] : null;
  };

  function mark(made, on) {
    if (!made) return;
    made.classList.toggle("now", on);
    for (const child of made.children) child.tabIndex = on ? 0 : -1; // the Tab key walks through the current round only
    made.querySelector(".mark")?.setAttribute("aria-expanded", String(on && unfolded));
  }
  function show(number, scroll = true) {
    const next = Math.max(0, Math.min(trace.rounds.length - 1, number)), inside = box.contains(document.activeElement);
    mark(element(current), false);
    current = next;
    const at = blockOf(current);
    for (const b of [at, at - 1, at + 1]) if (blocks[b]) fill(blocks[b]);
    mark(element(current), true);
    slide.value = current + 1;
    status.textContent = `Round ${current + 1} of ${trace.rounds.length}: ${summary(trace.rounds[current])}`;
    go.first.disabled = go.previous.disabled = current === 0;
    go.next.disabled = go.last.disabled = current === trace.rounds.length - 1;
    unfold();
    hide();
    if (inside && document.activeElement !== box && scroll) box.focus({ preventScroll: true });
    if (scroll) follow();
  }
  function follow() {
    const window = box.getBoundingClientRect(), place = element(current).getClientRects()[0];
    if (!place) return;
    const top = place.top - window.top;
    if (top > 0.12 * window.height && top < 0.7 * window.height) return;
    const near = Math.abs(top) < 2 * window.height && !calm.matches && !timer;
    box.scrollTo({ top: box.scrollTop + top - window.height / 3, behavior: near ? "smooth" : "instant" });
  }

  // The draft of the current round, as a tree of its nodes.
  function unfold() {
    const round = trace.rounds[current], [out, draft] = round, fate = fates(round), tree = isTree(draft);
    pane.replaceChildren(make("h3", "", `Round ${current + 1}`), make("p", "", summary(round)));
    pane.hidden = !unfolded;
    viewer.classList.toggle("folded", !unfolded);
    if (!unfolded) return;
    const table = make("table", "tree"), head = table.createTHead().insertRow(), body = table.createTBody();
    for (const word of ["draft", "target", "drafter", "rank"]) head.append(Object.assign(make("th", "", word), { scope: "col" }));
    const add = (values, name, lines, sign) => {
      const [string, id, parent, target, drafted, rank] = values, row = body.insertRow(), cell = row.insertCell();
      row.className = name;
      const chip = make(name === "refused" ? "del" : "span", name === "own" ? `t ${ORIGINS[parent]}` : name === "kept" ? "t accepted" : name === "refused" ? "t rejected" : "");
      spell(chip, trace.strings[string], id, true);
      cell.append(make("span", "sign", sign), make("span", "line", lines), chip);
      row.title = `${name === "own" ? SAYS[ORIGINS[parent]] : SAYS[name]}; id ${id}` +
        (name === "own" ? "" : parent < 0 ? "; follows the pending token" : `; follows “${trace.strings[draft[parent * DRAFT]]}”`);
      const cells = [row.insertCell(), row.insertCell(), row.insertCell()];
      cells[0].append(percent(target), chance(target, "target"));
      cells[1].append(percent(drafted), chance(drafted, "draft"));
      cells[2].append(rank === null ? "–" : rank + 1);
      return row;
    };
    const children = new Map(), count = draft.length / DRAFT;
    for (let i = count - 1; i >= 0; i--) {
      const parent = draft[i * DRAFT + 2];
      children.set(parent, [...(children.get(parent) ?? []), i]);
    }
    const stack = (children.get(-1) ?? []).map((i, k) => [i, "", k === 0]);
    while (stack.length) {
      const [i, before, last] = stack.pop();
      const sign = { kept: "✓", refused: "✗", unreached: "" }[fate[i]];
      add(node(draft, i, DRAFT), fate[i], tree ? before + (last ? "└ " : "├ ") : "", sign).dataset.node = i;
      (children.get(i) ?? []).forEach((child, k) => stack.push([child, before + (last ? " " : "│"), k === 0]));
    }
    if (out.length && out[out.length - OUT + 2] !== 0) add(node(out, out.length / OUT - 1, OUT), "own", "", "+");
    pane.append(table);
  }

  function point(made) {
    if (!made || made === hovered) return;
    hide();
    hovered = made;
    const [out, draft] = trace.rounds[made.parentElement.dataset.r], rejected = made.tagName === "DEL";
    const [string, id, origin, target, drafted, rank] = rejected ? node(draft, made.dataset.i, DRAFT) : node(out, made.dataset.i, OUT);
    const title = make("strong"), grid = make("div");
    spell(title, trace.strings[string], id, true);
    grid.append("target", make("span", "p", percent(target)), chance(target, "target"));
    if (rejected || origin === 0 || drafted !== null) grid.append("drafter", make("span", "p", percent(drafted)), chance(drafted, "draft"));
    grid.append("rank", make("span", "p", rank === null ? "–" : rank + 1), rank === 0 ? "most probable" : "");
    tip.replaceChildren(title, make("em", "", `${SAYS[rejected ? "refused" : ORIGINS[origin]]}; id ${id}`), grid);
    tip.hidden = false;
    made.classList.add("on");
    made.setAttribute("aria-describedby", "tip");
    place();
  }
  function place() {
    const at = hovered.getClientRects()[0], size = tip.getBoundingClientRect(), window = box.getBoundingClientRect();
    if (!at || at.bottom < Math.max(0, window.top) || at.top > Math.min(innerHeight, window.bottom)) return hide(); // scrolled away
    const above = at.top - size.height - 8, top = above >= 8 ? above : at.bottom + 8;
    tip.style.left = `${Math.max(8, Math.min(at.left, document.documentElement.clientWidth - size.width - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(top, innerHeight - size.height - 8))}px`;
  }
  function hide() {
    hovered?.classList.remove("on");
    hovered?.removeAttribute("aria-describedby");
    hovered = null;
    tip.hidden = true;
  }

  function play(on) {
    clearInterval(timer);
    timer = on ? setInterval(() => (current + 1 < trace.rounds.length ? show(current + 1) : play(false)), 650) : 0;
    go.play.setAttribute("aria-pressed", String(on));
    go.play.textContent = on ? "pause" : "play";
    status.setAttribute("aria-live", on ? "off" : "polite");
  }
  const moves = {
    first: () => show(0), previous: () => show(current - 1), next: () => show(current + 1), last: () => show(trace.rounds.length - 1),
  };

  function open(number) {
    play(false);
    hide();
    watch?.disconnect();
    try {
      trace = JSON.parse(data[number].textContent);
    } catch (error) {
      trouble.textContent = `Trace ${number + 1} cannot be read: ${error.message}`;
      trouble.hidden = false;
      return;
    }
    current = 0;
    blocks = divide();
    slide.max = trace.rounds.length;
    document.getElementById("greedy").hidden = !trace.greedy;
    const long = trace.prompt.length > 600, prompt = make(long ? "details" : "div", "prompt");
    prompt.append(make(long ? "summary" : "h3", "", long ? `prompt, ${trace.prompt.length.toLocaleString("en")} characters` : "prompt"), trace.prompt);
    box.replaceChildren(prompt, ...blocks.map((block) => block.element));
    box.scrollTop = 0;
    watch = new IntersectionObserver((seen) => seen.forEach((one) => (one.isIntersecting ? fill : empty)(one.target.block)), {
      root: box, rootMargin: "1200px 0px",
    });
    blocks.forEach((block) => watch.observe(block.element));
    show(0, false);
  }

  document.getElementById("choose").addEventListener("change", (event) => open(Number(event.target.value)));
  document.getElementById("rejects").addEventListener("change", (event) => box.classList.toggle("bare", !event.target.checked));
  slide.addEventListener("input", () => { play(false); show(Number(slide.value) - 1); });
  Object.keys(moves).forEach((name) => go[name].addEventListener("click", () => { play(false); moves[name](); }));
  go.play.addEventListener("click", () => {
    if (!timer && current === trace.rounds.length - 1) show(0);
    play(!timer);
  });
  box.addEventListener("pointerover", (event) => { if (event.pointerType === "mouse") point(event.target.closest(".t")); });
  box.addEventListener("pointerout", (event) => { if (event.pointerType === "mouse" && !event.relatedTarget?.closest?.(".t")) hide(); });
  box.addEventListener("focusin", (event) => (event.target.matches(".t") ? point(event.target) : hide()));
  box.addEventListener("focusout", hide);
  addEventListener("scroll", () => hovered && place(), { passive: true, capture: true }); // of the page and of every box on it
  box.addEventListener("click", (event) => {
    const round = event.target.closest(".round"), marked = event.target.closest(".mark");
    if (!round) return hide();
    play(false);
    const number = Number(round.dataset.r);
    unfolded = marked ? !(unfolded && number === current) : unfolded;
    show(number, false);
    point(event.target.closest(".t"));
  });
  box.addEventListener("copy", (event) => {
    event.clipboardData.setData("text/plain", getSelection().toString().replaceAll("\u00a0", " ").replaceAll("\u200b", ""));
    event.preventDefault();
  });
  const keys = { ArrowLeft: "previous", ArrowRight: "next", Home: "first", End: "last" };
  document.addEventListener("keydown", (event) => {
    const target = event.target, within = viewer.contains(target);
    if (event.ctrlKey || event.metaKey || event.altKey || target.matches("select, input[type=range]")) return; // they have their own
    if (event.key === "Escape") return hide();
    const place = viewer.getBoundingClientRect(), visible = place.top < innerHeight && place.bottom > 0;
    if (!within && !(target === document.body && visible && event.key.startsWith("Arrow"))) return;
    if (event.key === " " && !target.matches("button, input")) go.play.click();
    else if (keys[event.key]) { play(false); moves[keys[event.key]](); }
    else return;
    event.preventDefault();
  });
  open(0);
})();
