// On a phone a table has no head: each cell carries the name of its column.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) {
    const names = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, column) => {
        if (names[column] && cell.textContent.trim()) cell.dataset.label = names[column];
      });
    }
  }
});
