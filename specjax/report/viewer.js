// The viewer of token traces. A trace may have 10^5 tokens: the rounds are divided into blocks, and
// only the blocks near the visible part of the text are filled.
(() => {
  "use strict";
  const box = document.getElementById("text");
  if (!box) return;
  const [pane, slide, status, trouble] = ["draft", "slide", "status", "trouble"].map((id) =>
    document.getElementById(id));
  const viewer = document.getElementById("viewer");
  const data = [...document.querySelectorAll("script.trace-data")];
  const go = Object.fromEntries(
    [...viewer.querySelectorAll("[data-go]")].map((button) => [button.dataset.go, button]));
  const { OUT, DRAFT, ORIGINS, make, spell, outcomes, summary } = tokens;
  // Rounds of a block: after LEAST it ends at the next line feed, at the latest after MOST.
  const LEAST = 40, MOST = 120;
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  let trace, blocks, current = 0, unfolded = true, timer = 0, observer = null;

  function token(flat, index, width, className) {
    const element = make(className === "rejected" ? "del" : "span", `t ${className}`);
    element.dataset.i = index;
    element.tabIndex = -1;
    const text = trace.strings[flat[index * width]];
    spell(element, text, flat[index * width + 1], className === "rejected");
    return element;
  }
  function build(number) {
    const round = trace.rounds[number], [out, draft] = round, element = make("span", "round");
    element.dataset.r = number;
    const outcome = outcomes(round);
    if (draft.length) {
      const mark = make("button", "mark", outcome.filter((one) => one === "accepted").length);
      mark.type = "button";
      mark.tabIndex = -1;
      mark.setAttribute("aria-label", `Round ${number + 1}: ${summary(round)}; show its draft`);
      element.append(mark);
    }
    const count = out.length / OUT;
    for (let i = 0; i < count; i++) {
      const origin = ORIGINS[out[i * OUT + 2]];
      if (origin === "residual" && i === count - 1) {
        // Only the first of several rejected siblings; the table of the draft has all of them.
        const rejected = outcome.indexOf("rejected");
        if (rejected >= 0) element.append(token(draft, rejected, DRAFT, "rejected"));
      }
      element.append("\u200b", token(out, i, OUT, origin)); // lines break between tokens
    }
    return element;
  }

  function fill(block) {
    if (block.full) return;
    block.full = true;
    const element = block.element, height = element.offsetHeight;
    const above = element.offsetTop + height <= box.scrollTop;
    const rounds = document.createDocumentFragment();
    for (let r = block.start; r < block.end; r++) rounds.append(build(r));
    element.style.height = "";
    element.replaceChildren(rounds);
    // The visible text stays where it is.
    if (above) box.scrollTop += element.offsetHeight - height;
  }
  function empty(block) {
    const isCurrent = block.start <= current && current < block.end;
    if (!block.full || isCurrent || block.element.contains(document.activeElement)) return;
    block.element.style.height = `${block.element.offsetHeight}px`;
    block.full = false;
    block.element.replaceChildren();
  }

  // Divides the rounds into blocks, each with an estimate of its height.
  function divide() {
    const lengths = trace.strings.map((text) => text.length);
    const feeds = trace.strings.map((text) => text.includes("\n"));
    const columns = Math.max(20, Math.floor((box.clientWidth - 44) / 9)), result = [];
    let start = 0, size = 0, lines = 0;
    trace.rounds.forEach(([out], r) => {
      let feed = false;
      for (let i = 0; i < out.length; i += OUT) {
        size += lengths[out[i]];
        if ((feed = feeds[out[i]])) lines += 0.6;
      }
      size += 3;
      const count = r + 1 - start;
      if (count >= MOST || (count >= LEAST && feed) || r + 1 === trace.rounds.length) {
        const element = make("div", "block");
        element.style.height = `${Math.ceil(31 * (size / columns + lines + 0.5))}px`;
        result.push({ start, end: r + 1, element, full: false });
        element.block = result[result.length - 1];
        [start, size, lines] = [r + 1, 0, 0];
      }
    });
    return result;
  }

  function blockOf(number) {
    let low = 0, high = blocks.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (blocks[middle].start <= number) low = middle; else high = middle - 1;
    }
    return low;
  }
  const roundElement = (number) => {
    const block = blocks[blockOf(number)];
    return block.full ? block.element.children[number - block.start] : null;
  };

  function mark(element, on) {
    if (!element) return;
    element.classList.toggle("now", on);
    // The Tab key reaches the tokens of the current round only.
    for (const child of element.children) child.tabIndex = on ? 0 : -1;
    element.querySelector(".mark")?.setAttribute("aria-expanded", String(on && unfolded));
  }
  function show(number, scroll = true) {
    const next = Math.max(0, Math.min(trace.rounds.length - 1, number));
    const inside = box.contains(document.activeElement);
    mark(roundElement(current), false);
    current = next;
    const at = blockOf(current), count = trace.rounds.length;
    for (const b of [at, at - 1, at + 1]) if (blocks[b]) fill(blocks[b]);
    mark(roundElement(current), true);
    slide.value = current + 1;
    status.textContent = `Round ${current + 1} of ${count}: ${summary(trace.rounds[current])}`;
    go.first.disabled = go.previous.disabled = current === 0;
    go.next.disabled = go.last.disabled = current === count - 1;
    showDraft();
    tokenTip.hide();
    const lost = inside && document.activeElement !== box && scroll;
    if (lost) box.focus({ preventScroll: true });
    if (scroll) scrollToCurrent();
  }
  function scrollToCurrent() {
    const view = box.getBoundingClientRect(), at = roundElement(current).getClientRects()[0];
    if (!at) return;
    const top = at.top - view.top;
    if (top > 0.12 * view.height && top < 0.7 * view.height) return;
    const near = Math.abs(top) < 2 * view.height && !calm.matches && !timer;
    const behavior = near ? "smooth" : "instant";
    box.scrollTo({ top: box.scrollTop + top - view.height / 3, behavior });
  }
  function showDraft() {
    const round = trace.rounds[current], title = make("h3", "", `Round ${current + 1}`);
    pane.replaceChildren(title, make("p", "", summary(round)));
    pane.hidden = !unfolded;
    viewer.classList.toggle("folded", !unfolded);
    if (unfolded) pane.append(draftTable(round, trace.strings));
  }
  const point = (element) => tokenTip.show(element, trace.rounds, trace.strings);

  function step() {
    if (current + 1 < trace.rounds.length) show(current + 1); else play(false);
  }
  function play(on) {
    clearInterval(timer);
    timer = on ? setInterval(step, 650) : 0;
    go.play.setAttribute("aria-pressed", String(on));
    go.play.textContent = on ? "pause" : "play";
    status.setAttribute("aria-live", on ? "off" : "polite");
  }
  const moves = {
    first: () => show(0),
    previous: () => show(current - 1),
    next: () => show(current + 1),
    last: () => show(trace.rounds.length - 1),
  };

  function promptElement(text) {
    const long = text.length > 600, element = make(long ? "details" : "div", "prompt");
    const count = text.length.toLocaleString("en");
    const title = long ? `prompt, ${count} characters` : "prompt";
    element.append(make(long ? "summary" : "h3", "", title), text);
    return element;
  }
  function open(number) {
    play(false);
    tokenTip.hide();
    observer?.disconnect();
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
    box.replaceChildren(promptElement(trace.prompt), ...blocks.map((block) => block.element));
    box.scrollTop = 0;
    const update = (entry) => (entry.isIntersecting ? fill : empty)(entry.target.block);
    observer = new IntersectionObserver((entries) => entries.forEach(update), {
      root: box, rootMargin: "1200px 0px",
    });
    blocks.forEach((block) => observer.observe(block.element));
    show(0, false);
  }

  document.getElementById("choose").addEventListener("change", (event) =>
    open(Number(event.target.value)));
  document.getElementById("rejects").addEventListener("change", (event) =>
    box.classList.toggle("bare", !event.target.checked));
  slide.addEventListener("input", () => { play(false); show(Number(slide.value) - 1); });
  Object.keys(moves).forEach((name) =>
    go[name].addEventListener("click", () => { play(false); moves[name](); }));
  go.play.addEventListener("click", () => {
    if (!timer && current === trace.rounds.length - 1) show(0);
    play(!timer);
  });
  box.addEventListener("pointerover", (event) => {
    if (event.pointerType === "mouse") point(event.target.closest(".t"));
  });
  box.addEventListener("pointerout", (event) => {
    const onToken = event.relatedTarget?.closest?.(".t");
    if (event.pointerType === "mouse" && !onToken) tokenTip.hide();
  });
  box.addEventListener("focusin", (event) => {
    if (event.target.matches(".t")) point(event.target); else tokenTip.hide();
  });
  box.addEventListener("focusout", tokenTip.hide);
  // The page may scroll, or any box on it.
  addEventListener("scroll", tokenTip.place, { passive: true, capture: true });
  box.addEventListener("click", (event) => {
    const round = event.target.closest(".round"), marked = event.target.closest(".mark");
    if (!round) return tokenTip.hide();
    play(false);
    const number = Number(round.dataset.r);
    unfolded = marked ? !(unfolded && number === current) : unfolded;
    show(number, false);
    point(event.target.closest(".t"));
  });
  box.addEventListener("copy", (event) => {
    const text = getSelection().toString().replaceAll("\u00a0", " ").replaceAll("\u200b", "");
    event.clipboardData.setData("text/plain", text);
    event.preventDefault();
  });
  const keys = { ArrowLeft: "previous", ArrowRight: "next", Home: "first", End: "last" };
  document.addEventListener("keydown", (event) => {
    const target = event.target, within = viewer.contains(target);
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (target.matches("select, input[type=range]")) return; // the element uses the keys itself
    if (event.key === "Escape") return tokenTip.hide();
    const at = viewer.getBoundingClientRect(), visible = at.top < innerHeight && at.bottom > 0;
    // Elsewhere on the page the left and right arrows step, except in boxes that scroll with them.
    const around = target.closest(".scroll, .plots figure, .command");
    const scrolls = around && around.scrollWidth > around.clientWidth;
    const sideways = event.key === "ArrowLeft" || event.key === "ArrowRight";
    const onPage = !scrolls && visible && sideways;
    if (!within && !onPage) return;
    if (event.key === " " && !target.matches("button, input, summary")) go.play.click();
    else if (keys[event.key]) { play(false); moves[keys[event.key]](); }
    else return;
    event.preventDefault();
  });
  open(0);
})();
