// The table of results: a click on a heading sorts, a click on a method unfolds its details.
(() => {
  "use strict";
  const table = document.querySelector("table.results");
  if (!table) return;
  const heads = [...table.tHead.rows[0].cells];
  const value = (body, column) => {
    const text = body.rows[0].cells[column].dataset.sort;
    return text === "" ? null : isNaN(text) ? text : Number(text);
  };
  const sort = (column) => {
    const before = heads[column].getAttribute("aria-sort");
    const numeric = heads[column].classList.contains("number");
    // The first click sorts numbers in descending order and texts in ascending order.
    const down = before ? before === "ascending" : numeric;
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
    const order = [...table.tBodies].map((body) => [value(body, column), body]);
    order.sort(([a], [b]) => {
      // Values that were not measured come last.
      if (a === null || b === null) return (a === null) - (b === null);
      const numbers = typeof a === "number" && typeof b === "number";
      const sign = numbers ? a - b : String(a).localeCompare(String(b));
      return down ? -sign : sign;
    });
    order.forEach(([, body]) => table.append(body));
  };
  heads.forEach((head, column) =>
    head.querySelector("button").addEventListener("click", () => sort(column)));
  table.addEventListener("click", (event) => {
    const button = event.target.closest(".unfold");
    if (!button) return;
    const details = button.closest("tbody").rows[1];
    details.hidden = !details.hidden;
    button.setAttribute("aria-expanded", String(!details.hidden));
  });
})();
