(** Page-local optimality: of all reconstructions of a page by an offset and a part of rank R, the record's
    (mean and top R singular directions, from the eigenvectors of the P x P Gram matrix) leaves the least
    squared error.

    The eigendecomposition is an input, as it is in the code: E holds orthonormal eigenvectors as rows,
    [lam] the eigenvalues in descending order. *)
From mathcomp Require Import all_ssreflect all_algebra.
From Locks Require Import frame.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.
Import Order.TTheory GRing.Theory Num.Theory.
Local Open Scope ring_scope.

Section SquaredError.
Variables (F : realFieldType) (P D : nat).
Implicit Types (A B : 'M[F]_(P, D)) (Q H : 'M[F]_P).

(** |A|_F^2 *)
Definition frobenius2 A : F := \tr (A *m A^T).

Lemma frobenius2E A : frobenius2 A = \sum_t energy (row t A).
Proof. by apply: eq_bigr => t _; rewrite /energy !mxE; apply: eq_bigr => j _; rewrite !mxE. Qed.

Lemma frobenius2_ge0 A : 0 <= frobenius2 A.
Proof. by rewrite frobenius2E; apply: sumr_ge0 => t _; apply: energy_ge0. Qed.

Lemma projector_complement Q : orthogonal_projector Q -> orthogonal_projector (1%:M - Q).
Proof.
case=> QT QQ; split; first by rewrite linearB /= trmx1 QT.
by rewrite mulmxBl mul1mx mulmxBr mulmx1 QQ subrr subr0.
Qed.

(** tr(Q A A^T) is the energy that Q keeps of the columns of A. *)
Lemma frobenius2_projected Q A :
  orthogonal_projector Q -> frobenius2 (Q *m A) = \tr (Q *m (A *m A^T)).
Proof.
by case=> QT QQ; rewrite /frobenius2 trmx_mul QT !mulmxA mxtrace_mulC !mulmxA QQ.
Qed.

(** Pythagoras *)
Lemma frobenius2_split Q A :
  orthogonal_projector Q -> frobenius2 A = frobenius2 (Q *m A) + frobenius2 ((1%:M - Q) *m A).
Proof.
move=> QP; rewrite !frobenius2_projected //; last exact: projector_complement.
by rewrite mulmxBl mul1mx linearB /= addrC subrK.
Qed.

Lemma frobenius2_projector_le Q A : orthogonal_projector Q -> frobenius2 (Q *m A) <= frobenius2 A.
Proof. by move=> QP; rewrite (frobenius2_split A QP) ler_addl frobenius2_ge0. Qed.

End SquaredError.

(** A projection makes no row longer. *)
Lemma energy_projector_le (F : realFieldType) (P : nat) (Q : 'M[F]_P) (v : 'rV[F]_P) :
  orthogonal_projector Q -> energy (v *m Q) <= energy v.
Proof.
have energy_column (w : 'rV[F]_P) : energy w = frobenius2 w^T.
  by rewrite /frobenius2 mxtrace_mulC trmxK /mxtrace big_ord1.
by move=> QP; have [QT _] := QP; rewrite !energy_column trmx_mul QT frobenius2_projector_le.
Qed.

Section ColumnSpace.
Variables (F : realFieldType) (P D : nat).

(** Independent rows have an invertible Gram matrix. *)
Lemma gram_unit r (W : 'M[F]_(r, P)) : row_free W -> W *m W^T \in unitmx.
Proof.
move=> Wfree; rewrite -row_free_unit; apply/row_freeP/row_freeP; rewrite -kermx_eq0.
apply/eqP/row_matrixP => i; rewrite row0; set x := row i _.
have xWW : x *m (W *m W^T) = 0 by apply/sub_kermxP; apply: row_sub.
have : energy (x *m W) == 0 by rewrite /energy trmx_mul mulmxA -(mulmxA x) xWW mul0mx mxE.
by rewrite energy_eq0 => /eqP xW; apply: (row_free_inj Wfree); rewrite /= xW mul0mx.
Qed.

(** The orthogonal projector onto the span of independent rows leaves them as they are. *)
Lemma row_projector r (W : 'M[F]_(r, P)) :
  row_free W ->
  let Q := W^T *m invmx (W *m W^T) *m W in orthogonal_projector Q /\ W *m Q = W.
Proof.
move=> Wfree Q; have WQ : W *m Q = W by rewrite /Q !mulmxA mulmxV ?gram_unit // mul1mx.
split=> //; split; last by rewrite {1}/Q -mulmxA WQ.
by rewrite /Q !trmx_mul trmxK trmx_inv trmx_mul trmxK mulmxA.
Qed.

(** The orthogonal projector onto the column space of B. *)
Lemma column_projector (B : 'M[F]_(P, D)) :
  exists Q : 'M[F]_P, [/\ orthogonal_projector Q, Q *m B = B & (\rank Q <= \rank B)%N].
Proof.
have [QP WQ] := row_projector (row_base_free B^T); set Q := _ *m row_base _ in QP WQ.
exists Q; split=> //; last first.
  by apply: leq_trans (mxrankM_maxr _ _) _; rewrite eq_row_base mxrank_tr.
have [QT _] := QP; apply: trmx_inj; rewrite trmx_mul QT.
have /submxP[X ->] : (B^T <= row_base B^T)%MS by rewrite eq_row_base.
by rewrite -mulmxA WQ.
Qed.

End ColumnSpace.

(** Weights in [0, 1] that add up to at most R gain the most on the R largest values. *)
Lemma weighted_top (F : realFieldType) (P R : nat) (lam w : 'I_P -> F) :
  (forall i, 0 <= lam i) -> (forall i j : 'I_P, (i <= j)%N -> lam j <= lam i) ->
  (forall i, 0 <= w i <= 1) -> \sum_i w i <= R%:R ->
  \sum_i lam i * w i <= \sum_(i < P | (i < R)%N) lam i.
Proof.
move=> lam0 lam_desc w01 w_sum.
have [c [c0 c_low c_high]] : exists c, [/\ 0 <= c, forall i : 'I_P, (i < R)%N -> c <= lam i
                                         & forall i : 'I_P, (R <= i)%N -> lam i <= c].
  have [RP|PR] := ltnP R P; last first.
    exists 0; split=> // i.
    by rewrite leqNgt (leq_trans (ltn_ord i)).
  by exists (lam (Ordinal RP)); split=> // i iR; apply: lam_desc => //; apply: ltnW.
have [RP|PR] := leqP R P; last first.
  rewrite [X in _ <= X](eq_bigl xpredT) => [|i]; last by rewrite (ltn_trans (ltn_ord i)).
  by apply: ler_sum => i _; have /andP[_ w1] := w01 i; rewrite ler_pimulr.
have sum_c : \sum_(i < P | (i < R)%N) c = c * R%:R.
  by rewrite (big_ord_narrow RP) sumr_const card_ord mulr_natr.
have term i : lam i * w i <= c * w i + (if (i < R)%N then lam i - c else 0).
  have /andP[w0 w1] := w01 i; rewrite -ler_subl_addl -mulrBl.
  case: (ltnP i R) => iR; first by rewrite ler_pimulr // subr_ge0 c_low.
  by rewrite mulr_le0_ge0 // subr_le0 c_high.
apply: le_trans (ler_sum _ (fun i _ => term i)) _.
rewrite big_split /= -mulr_sumr -big_mkcond /= sumrB sum_c.
by rewrite addrCA ger_addl subr_le0 ler_wpmul2l.
Qed.

Section EckartYoung.
Variables (F : realFieldType) (P D R : nat) (A : 'M[F]_(P, D)) (E : 'M[F]_P) (lam : 'I_P -> F).

(** The rows of E are orthonormal eigenvectors of the Gram matrix A A^T. *)
Hypothesis frameE : orthonormal_frame E.
Hypothesis eigen : E *m (A *m A^T) *m E^T = diag_mx (\row_i lam i).
Hypothesis lam_desc : forall i j : 'I_P, (i <= j)%N -> lam j <= lam i.

(** The projector onto the first R eigenvectors, and the part of A that the record keeps. *)
Definition top_projector : 'M[F]_P := E^T *m pid_mx R *m E.
Definition rank_part : 'M[F]_(P, D) := top_projector *m A.

Let EtE : E^T *m E = 1%:M := mulmx1C frameE.

Lemma top_projector_orthogonal : orthogonal_projector top_projector.
Proof.
rewrite /top_projector; split; first by rewrite !trmx_mul trmxK tr_pid_mx mulmxA.
rewrite !mulmxA -(mulmxA _ E E^T) frameE mulmx1.
by rewrite -(mulmxA _ (pid_mx R) (pid_mx R)) mul_pid_mx minnn pid_mx_minv.
Qed.

(** lam_i is the energy of A along the i-th eigenvector. *)
Lemma eigenvalue_ge0 i : 0 <= lam i.
Proof.
have -> : lam i = energy (row i (E *m A)); last exact: energy_ge0.
have := congr1 (fun M : 'M_P => M i i) eigen; rewrite [RHS]mxE eqxx mulr1n [RHS]mxE => <-.
rewrite mulmxA -mulmxA -trmx_mul /energy !mxE.
by apply: eq_bigr => j _; rewrite !mxE.
Qed.

(** What a projector keeps of A is a weighted sum of the eigenvalues. *)
Lemma projected_eigen Q :
  orthogonal_projector Q -> frobenius2 (Q *m A) = \sum_i lam i * energy (row i E *m Q).
Proof.
move=> QP; have [QT QQ] := QP; rewrite frobenius2_projected //.
have gram : A *m A^T = E^T *m diag_mx (\row_i lam i) *m E.
  by rewrite -eigen !mulmxA EtE mul1mx -!mulmxA EtE mulmx1.
rewrite gram !mulmxA mxtrace_mulC !mulmxA; apply: eq_bigr => i _.
rewrite mul_mx_diag !mxE mulrC; congr (_ * _).
rewrite /energy trmx_mul QT mulmxA -(mulmxA _ Q Q) QQ tr_row -row_mul !mxE.
by apply: eq_bigr => j _; rewrite ![row _ _ _ _]mxE ![col _ _ _ _]mxE.
Qed.

Lemma frobenius2_eigen : frobenius2 A = \sum_i lam i.
Proof.
have one : orthogonal_projector (1%:M : 'M[F]_P) by split; rewrite ?trmx1 ?mulmx1.
rewrite -[A in LHS]mul1mx projected_eigen //; apply: eq_bigr => i _.
by rewrite mulmx1 (frame_unit i frameE) mulr1.
Qed.

(** The energy that is kept: the sum of the R largest eigenvalues. *)
Lemma rank_part_energy : frobenius2 rank_part = \sum_(i < P | (i < R)%N) lam i.
Proof.
rewrite projected_eigen; last exact: top_projector_orthogonal.
rewrite [RHS]big_mkcond /=; apply: eq_bigr => i _.
have -> : row i E *m top_projector = row i (pid_mx R *m E).
  by rewrite /top_projector -row_mul !mulmxA frameE mul1mx.
have -> : row i (pid_mx R *m E) = (i < R)%N%:R *: row i E.
  apply/rowP => j; rewrite !mxE (bigD1 i) //= big1 => [|k /negbTE ki]; rewrite !mxE.
    by rewrite eqxx addr0.
  by rewrite eq_sym (_ : (k == i :> nat) = false) ?mul0r //; apply: ki.
rewrite energy_scale (frame_unit i frameE) mulr1.
by case: (i < R)%N; rewrite ?expr1n ?mulr1 // expr0n mulr0.
Qed.

(** The energy that is left: the sum of the eigenvalues beyond the R-th. *)
Lemma rank_part_error : frobenius2 (A - rank_part) = \sum_(i < P | (R <= i)%N) lam i.
Proof.
have := frobenius2_split A top_projector_orthogonal; rewrite -/rank_part rank_part_energy.
rewrite frobenius2_eigen mulmxBl mul1mx (bigID (fun i : 'I_P => (i < R)%N)) /= => /addrI <-.
by apply: eq_bigl => i; rewrite -leqNgt.
Qed.

(** No matrix of rank at most R is nearer to A than the record's part. *)
Theorem eckart_young :
  [/\ (\rank rank_part <= R)%N,
      frobenius2 (A - rank_part) = \sum_(i < P | (R <= i)%N) lam i
    & forall B : 'M[F]_(P, D), (\rank B <= R)%N -> frobenius2 (A - rank_part) <= frobenius2 (A - B)].
Proof.
split=> [||B rankB].
- apply: leq_trans (mxrankM_maxl _ _) _; apply: leq_trans (mxrankM_maxl _ _) _.
  apply: leq_trans (mxrankM_maxr _ _) _.
  by have [RP|/ltnW PR] := leqP R P; [rewrite rank_pid_mx | apply: leq_trans (rank_leq_row _) PR].
- exact: rank_part_error.
have [Q [QP QB rankQ]] := column_projector B; have CP := projector_complement QP.
apply: le_trans (frobenius2_projector_le (A - B) CP).
have -> : (1%:M - Q) *m (A - B) = (1%:M - Q) *m A.
  by rewrite mulmxBr [(1%:M - Q) *m B]mulmxBl mul1mx QB subrr subr0.
have kept_le : frobenius2 (Q *m A) <= frobenius2 rank_part.
  rewrite projected_eigen // rank_part_energy; apply: weighted_top => // [|i|].
  - exact: eigenvalue_ge0.
  - by rewrite energy_ge0 -(frame_unit i frameE) energy_projector_le.
  - by rewrite frame_energy_sum // ler_nat (leq_trans rankQ).
have splitQ := frobenius2_split A QP.
have splitT := frobenius2_split A top_projector_orthogonal.
rewrite [(1%:M - top_projector) *m A]mulmxBl mul1mx -/rank_part in splitT.
by rewrite -(ler_add2l (frobenius2 rank_part)) -splitT splitQ ler_add2r.
Qed.

End EckartYoung.

(** The premises can be met with any descending eigenvalues that are squares (over the reals: by any page,
    which is the spectral theorem). *)
Lemma eckart_young_premises (F : realFieldType) (P : nat) (d : 'rV[F]_P) :
  let A := diag_mx d in
  orthonormal_frame (1%:M : 'M[F]_P) /\
  1%:M *m (A *m A^T) *m 1%:M^T = diag_mx (\row_i d 0 i ^+ 2).
Proof.
move=> A; split; first by rewrite /orthonormal_frame trmx1 mulmx1.
rewrite trmx1 mulmx1 mul1mx tr_diag_mx mul_diag_mx; apply/matrixP => i j; rewrite !mxE.
by case: eqP => [->|]; rewrite ?mulr1n ?mulr0n ?mulr0.
Qed.

Section Page.
Variables (F : realFieldType) (P D : nat).
Implicit Types K : 'M[F]_(P, D).

(** The mean of the rows, and the matrix that takes it away. *)
Definition mean K : 'rV[F]_D := P%:R^-1 *: (const_mx 1 *m K).
Definition centre : 'M[F]_P := 1%:M - const_mx P%:R^-1.

(** The same offset in every row. *)
Definition offset (a : 'rV[F]_D) : 'M[F]_(P, D) := const_mx 1 *m a.

Lemma centreE K : centre *m K = K - offset (mean K).
Proof.
rewrite /centre mulmxBl mul1mx /offset /mean -scalemxAr mulmxA; congr (_ - _).
rewrite scalemxAl; congr (_ *m _).
by apply/matrixP => i j; rewrite !mxE big_ord1 !mxE !mulr1.
Qed.

Lemma centre_orthogonal : (0 < P)%N -> orthogonal_projector centre.
Proof.
move=> P0; apply: projector_complement; split; first exact: trmx_const.
apply/matrixP => i j; rewrite !mxE (eq_bigr (fun=> P%:R^-1 * P%:R^-1)) => [|k _]; last by rewrite !mxE.
by rewrite sumr_const card_ord -mulr_natr -mulrA mulVf ?mulr1 // pnatr_eq0 -lt0n.
Qed.

Lemma centre_offset a : (0 < P)%N -> centre *m offset a = 0.
Proof.
move=> P0; rewrite /centre /offset mulmxA mulmxBl mul1mx.
suff -> : (const_mx P%:R^-1 : 'M[F]_P) *m const_mx 1 = const_mx 1 :> 'cV_P by rewrite subrr mul0mx.
apply/matrixP => i j; rewrite !mxE (eq_bigr (fun=> P%:R^-1)) => [|k _]; last by rewrite !mxE mulr1.
by rewrite sumr_const card_ord -[_ *+ P]mulr_natr mulVf // pnatr_eq0 -lt0n.
Qed.

(** Of all reconstructions by an offset and a part of rank R, the mean and the R top directions of the
    centred page have the least squared error. *)
Theorem page_record_optimal K (R : nat) (E : 'M[F]_P) (lam : 'I_P -> F) :
  (0 < P)%N ->
  let A := K - offset (mean K) in
  orthonormal_frame E -> E *m (A *m A^T) *m E^T = diag_mx (\row_i lam i) ->
  (forall i j : 'I_P, (i <= j)%N -> lam j <= lam i) ->
  let record := offset (mean K) + rank_part R A E in
  frobenius2 (K - record) = \sum_(i < P | (R <= i)%N) lam i /\
  forall (a : 'rV[F]_D) (B : 'M[F]_(P, D)), (\rank B <= R)%N ->
    frobenius2 (K - record) <= frobenius2 (K - (offset a + B)).
Proof.
move=> P0 A frameE eigen lam_desc record.
have -> : K - record = A - rank_part R A E by rewrite /record opprD addrA.
have [_ error best] := eckart_young R frameE eigen lam_desc; split=> // a B rankB.
apply: le_trans (frobenius2_projector_le _ (centre_orthogonal P0)).
have -> : centre *m (K - (offset a + B)) = A - centre *m B.
  by rewrite mulmxBr mulmxDr centre_offset // add0r centreE.
by apply: best; apply: leq_trans rankB; apply: mxrankM_maxr.
Qed.

End Page.
