# shellcheck shell=bash
# Sourced by run.sh: the documentation as a site, from mkdocs.yml. The last section of an optimizer's page is its
# docstring: torch is needed, the native library is not.

# Succeeds if what the site is built with is there; else says in one line why it is not.
install_site() {
  local missing
  mapfile -t missing < <(missing_python_packages "$python" docs)
  ((${#missing[@]} == 0)) || is_online || die "the site needs ${missing[*]}, and there is no network to get them by"
  need_python_packages docs
}

site() { env NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs "$@" --config-file "$root/mkdocs.yml"; }

# A warning is an error, and --quiet would hide it from --strict.
build_site() { step site "building the site" site build --strict; }

docs() {
  [[ $* == @(|build) ]] || die "docs takes no argument but build: $*"
  install_site
  if (($#)); then
    build_site && say "open $root/build/site/index.html"
  else
    site serve
  fi
}

test_site() {
  (install_site) || { say "skipped: the site is not built" && return; }
  build_site
}
