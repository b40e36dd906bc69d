// The table of results: a click on a heading sorts, a click on a method unfolds its details.
(() => {
  "use strict";
  const table = document.querySelector("table.results");
  if (!table) return;
  const heads = [...table.tHead.rows[0].cells];
  const value = (body, place) => {
    const text = body.rows[0].cells[place].dataset.sort;
    return text === "" ? null : isNaN(text) ? text : Number(text);
  };
  const sort = (place) => {
    const was = heads[place].getAttribute("aria-sort");
    const numeric = heads[place].classList.contains("number");
    // The best first: great numbers on the first click, and words from a to z.
    const down = was ? was === "ascending" : numeric;
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[place].setAttribute("aria-sort", down ? "descending" : "ascending");
    const order = [...table.tBodies].map((body) => [value(body, place), body]);
    order.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null); // what was not measured comes last
      const sign = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
      return down ? -sign : sign;
    });
    order.forEach(([, body]) => table.append(body));
  };
  heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => sort(place)));
  table.addEventListener("click", (event) => {
    const button = event.target.closest(".unfold");
    if (!button) return;
    const more = button.closest("tbody").rows[1];
    more.hidden = !more.hidden;
    button.setAttribute("aria-expanded", String(!more.hidden));
  });
})();
