// A head: A_ij = max_i (code_ij / levels)^2, and the responsibilities of its components.

class Head {
  constructor(length, steps, maxima, codes, shares, prior) {
    Object.assign(this, { length, steps, maxima, codes, shares, prior });
    this.components = shares.length + 1;
    this.largest = maxima.reduce((most, value) => Math.max(most, value), 0) || 1;
  }

  weight(i, j) {
    return this.maxima[i] * (this.codes[i * this.length + j] / this.steps.levels) ** 2;
  }

  // gamma_ijr; the components of a pair sum to 1.
  share(i, j, r) {
    const last = this.components - 1;
    if (last === 0) return 1;
    const place = i * this.length + j;
    if (r < last) return this.shares[r][place] / this.steps.shares;
    let rest = 1;
    for (const shares of this.shares) rest -= shares[place] / this.steps.shares;
    return Math.max(0, rest);
  }

  // The weight through one component, or through all.
  through(i, j, r) {
    const weight = this.weight(i, j);
    return r < 0 || this.components === 1 ? weight : weight * this.share(i, j, r);
  }

  // How much of query i's attention goes through component r.
  use(i, r) {
    let sum = 0;
    for (let j = 0; j < this.length; j++) sum += this.through(i, j, r);
    return sum;
  }

  meanUse(r) {
    let sum = 0;
    for (let i = 0; i < this.length; i++) sum += this.use(i, r);
    return sum / this.length;
  }

  colour(i, j, r) {
    if (this.components === 1 || r >= 0) return component(Math.max(0, r));
    const mixed = [0, 0, 0];
    for (let s = 0; s < this.components; s++) {
      const part = this.share(i, j, s);
      component(s).forEach((value, channel) => (mixed[channel] += part * value));
    }
    return mixed;
  }

  // From 0 to 1: the square root shows small weights too.
  brightness(i, j) {
    const r = this.components > 1 ? shared.component : -1;
    const most = shared.byMap ? this.largest : this.maxima[i] || 1;
    return Math.sqrt(Math.min(1, this.through(i, j, r) / most));
  }

  // A picture of size x size pixels; a pixel shows the largest weight of the pairs under it.
  picture(size) {
    const canvas = element("canvas", { width: size, height: size });
    const image = new ImageData(size, size);
    const step = this.length / size;
    for (let y = 0; y < size; y++) {
      for (let x = 0; x < size; x++) {
        let best = -1,
          row = 0,
          column = 0;
        for (
          let i = Math.floor(y * step);
          i < Math.max((y + 1) * step, Math.floor(y * step) + 1) && i < this.length;
          i++
        ) {
          for (
            let j = Math.floor(x * step);
            j < Math.max((x + 1) * step, Math.floor(x * step) + 1) && j < this.length;
            j++
          ) {
            const value = this.brightness(i, j);
            if (value > best) [best, row, column] = [value, i, j];
          }
        }
        const colour = this.colour(row, column, this.components > 1 ? shared.component : -1);
        const start = 4 * (y * size + x);
        for (let c = 0; c < 3; c++)
          image.data[start + c] = colours.paper[c] + best * (colour[c] - colours.paper[c]);
        image.data[start + 3] = 255;
      }
    }
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }
}

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Layer by layer: the row maxima of all heads (16 bits), then their codes, then the shares of all components but one.
async function unpack(model) {
  const bytes = await inflate(model.data);
  const numbers = new DataView(bytes.buffer);
  const length = model.tokens.length,
    pairs = length * length;
  let place = 0;
  return model.layers.map(({ heads, components, priors }) => {
    const maxima = place,
      codes = maxima + 2 * heads * length,
      shares = codes + heads * pairs;
    place = shares + heads * (components - 1) * pairs;
    return Array.from({ length: heads }, (_, h) => {
      const largest = Float32Array.from(
        { length },
        (_, i) => numbers.getUint16(maxima + 2 * (h * length + i), true) / 65535,
      );
      const part = (start) => bytes.subarray(start, start + pairs);
      const parts = Array.from({ length: components - 1 }, (_, r) =>
        part(shares + (h * (components - 1) + r) * pairs),
      );
      return new Head(length, given.steps, largest, part(codes + h * pairs), parts, priors ? priors[h] : [1]);
    });
  });
}
