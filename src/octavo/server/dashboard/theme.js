// Before anything is drawn, so that nothing flashes: the theme that was chosen here before, or the system's.
const chosen = localStorage.getItem("octavo-theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
